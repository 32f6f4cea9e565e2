"""A loop, a loss and rows of one's own.

`python examples/own_loop.py` takes 10 seconds on two cores; the loss falls from 6.2 to 5.0.

The loss here is plain cross-entropy with an entropy-like penalty on confident tokens; write whatever you like of
log-probabilities. Weights of a step's rows are divided by their sum once, so that microbatches just add up.
"""

import torch

import luthier
from luthier.config.sections import AdamWConfig

QUESTIONS = {"What is the capital of Ruritania?": "Strelsau.", "Who wrote the score?": "Nobody knows."}


def careful(logprobs: torch.Tensor, batch: luthier.Batch) -> torch.Tensor:
    """[T] log-probabilities and the batch to a scalar."""
    weights = batch.weights[0]
    return (weights * (-logprobs + 0.01 * logprobs.exp())).sum()


state = luthier.load(
    "debug:qwen3", adapter=luthier.LoraConfig(rank=8), optimizer=AdamWConfig(learning_rate=2e-2), precision="fp32"
)
rows = []
for question, answer in QUESTIONS.items():
    turn = [{"role": "user", "content": question}]
    prompt = state.tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]
    target = state.tokenizer(answer + "<|im_end|>")["input_ids"]
    rows.append(luthier.Sample.from_ids([*prompt, *target], [0.0] * len(prompt) + [1.0] * len(target)))

for step in range(30):
    batch = luthier.Batch.pack(rows)
    output = luthier.forward_backward(state, batch.scaled(1 / batch.total_weight), careful)
    update = luthier.optim_step(state, loss=float(output.loss), max_gradient_norm=1.0)
    if step % 10 == 0 or step == 29:
        print(f"step {step}: loss {float(output.loss):.3f}, gradient norm {update.gradient_norm:.3f}")

print(luthier.evaluate(state, rows))
