"""Supervised fine-tuning as a loop of one's own, in Tinker's calls, on a model that needs no download.

`python examples/tinker_sft.py` takes ten seconds on a core; the loss falls from 6.2 to 1.1, and what the model makes of
the questions begins to look like the answers. Give `LocalTrainingClient` any Hub id, directory or loaded model instead
of "debug:qwen3".
"""

from luthier.tinker import AdamParams, Datum, LocalTrainingClient, LoraConfig, ModelInput, SamplingParams

QUESTIONS = {"What is the capital of Ruritania?": "Strelsau.", "Who wrote the score?": "Nobody knows."}

client = LocalTrainingClient("debug:qwen3", LoraConfig(rank=8), precision="fp32")
tokenizer = client.get_tokenizer()


def prompt_of(question: str) -> list[int]:
    turn = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]


data = []
for question, answer in QUESTIONS.items():
    prompt = prompt_of(question)
    target = tokenizer(answer + "<|im_end|>")["input_ids"]
    ids = [*prompt, *target]
    # Position i predicts target_tokens[i]. Every answer weighs 1 / 2, whatever its length: the loss is a plain sum.
    weights = [0.0] * (len(prompt) - 1) + [1 / len(target) / len(QUESTIONS)] * len(target)
    data.append(Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:], "weights": weights}))

STEPS = 40
curve = []
for step in range(STEPS):
    output = client.forward_backward(data, "cross_entropy")
    client.optim_step(AdamParams(learning_rate=2e-2 * (1 - step / STEPS), grad_clip_norm=1.0)).result()
    curve.append(output.result().metrics["loss:sum"])

for step in range(0, STEPS, 4):
    print(f"step {step:2d}  loss {curve[step]:.3f}  {'#' * round(8 * curve[step])}")
for question in QUESTIONS:
    greedy = SamplingParams(max_tokens=24, temperature=0.0, stop=tokenizer("<|im_end|>")["input_ids"])
    text = client.sample(ModelInput.from_ints(prompt_of(question)), 1, greedy).result().sequences[0]
    print(f"{question} {tokenizer.decode(text.tokens, skip_special_tokens=True)}")
