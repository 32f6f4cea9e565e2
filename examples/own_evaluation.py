"""A function of one's own over a data set, with the inference loop: `python examples/own_evaluation.py [MODEL] [ROWS]`.

For every row the model's log-probabilities of the trained tokens are at hand; here they give the share of tokens that
the model would have chosen with more than even odds, and the row it finds hardest.
"""

import sys

import torch

import luthier

model = sys.argv[1] if len(sys.argv) > 1 else "debug:qwen3"
path = sys.argv[2] if len(sys.argv) > 2 else "examples/rows.jsonl"

state = luthier.load(model)
likely = total = 0
hardest = (0.0, "")
for sample in luthier.read_rows(state, path):
    found = luthier.logprobs(state, luthier.Batch.pack([sample]))  # [T], 0 where nothing is trained
    trained = torch.from_numpy(sample.weights) != 0
    likely += int((found[trained] > -0.6931).sum())
    total += int(trained.sum())
    hardest = max(hardest, (-float(found[trained].mean()), sample.origin))

print(f"{likely} of {total} tokens likelier than not; hardest row {hardest[1]} at {hardest[0]:.2f} nats a token")
