"""Tasks of lm-evaluation-harness give what the harness's own model of Transformers gives, request by request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

from luthier.cli.main import main
from luthier.engine.build import build_network
from luthier.errors import UserError
from luthier.hf.debug.tiny import debug_config
from luthier.hf.source import resolve
from luthier.hf.tokenizer import load_tokenizer
from luthier.recipes.harness import HarnessModel
from tests.oracles.plain import save_strong

CONTEXTS = ["", "Question: What is 2 + 3?\nAnswer:", "The sky is blue because ", "a"]
ANSWERS = [" five", " 5", " of light", "b"]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[HarnessModel, Any]:
    """Ours, and the harness's own over unmodified Transformers, in float64."""
    path = save_strong(debug_config("llama"), tmp_path_factory.mktemp("models") / "llama")
    source = resolve(str(path))
    tokenizer = load_tokenizer(resolve("debug:llama"))
    network = build_network(source, adapter=None, precision="fp64")
    network.model.eval()
    plain = AutoModelForCausalLM.from_pretrained(path, dtype="float64").eval()
    theirs = HFLM(pretrained=plain, tokenizer=tokenizer, batch_size=1, max_length=2048, device="cpu")
    return HarnessModel(network, tokenizer), theirs


def asked(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=given, idx=i) for i, given in enumerate(arguments)]


def test_continuations(both: tuple[HarnessModel, Any]) -> None:
    ours, theirs = both
    requests = asked("loglikelihood", [(context, answer) for context in CONTEXTS for answer in ANSWERS])
    expected = theirs.loglikelihood(requests, disable_tqdm=True)
    found = ours.loglikelihood(requests)
    assert [one for one, _ in found] == pytest.approx([one for one, _ in expected], rel=1e-10)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@pytest.mark.parametrize(
    ("context", "answer"),
    [("the ca", "t"), ("the cat", ""), ("", ""), (" ", "a")],
    ids=["merged", "empty", "nothing at all", "after a space"],
)
def test_an_answer_without_a_token_of_its_own_is_refused(
    both: tuple[HarnessModel, Any], context: str, answer: str
) -> None:
    ours, theirs = both
    requests = asked("loglikelihood", [("The sky", " blue"), (context, answer)])
    with pytest.raises((AssertionError, IndexError)):
        theirs.loglikelihood(requests, disable_tqdm=True)
    with pytest.raises(UserError, match=f"the answer {answer!r} to {context!r} cannot be scored"):
        ours.loglikelihood(requests)


def test_the_likeliest_continuation_is_told(both: tuple[HarnessModel, Any]) -> None:
    ours, theirs = both
    [likely] = ours.generate_until(asked("generate_until", [("The sky", {"until": [], "max_gen_toks": 1})]))
    requests = asked("loglikelihood", [("The sky", likely), ("The sky", " zzz")])
    assert [greedy for _, greedy in ours.loglikelihood(requests)] == [True, False]
    assert [greedy for _, greedy in theirs.loglikelihood(requests, disable_tqdm=True)] == [True, False]


def test_whole_texts_in_windows(both: tuple[HarnessModel, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = both
    texts = ["A text.", "A longer text of many more words than a window has room for. " * 4]
    monkeypatch.setattr(ours, "max_length", 48)
    monkeypatch.setattr(theirs, "_max_length", 48)
    requests = asked("loglikelihood_rolling", [(text,) for text in texts])
    assert ours.loglikelihood_rolling(requests) == pytest.approx(
        theirs.loglikelihood_rolling(requests, disable_tqdm=True), rel=1e-10
    )


def test_texts_up_to_an_ending(both: tuple[HarnessModel, Any]) -> None:
    ours, theirs = both
    hows = [{"until": ["\n\n"], "max_gen_toks": 12}, {"until": ["e", "a"], "max_gen_toks": 20}]
    requests = asked("generate_until", [(context, dict(how)) for context in CONTEXTS[1:] for how in hows])
    assert ours.generate_until(requests) == theirs.generate_until(requests, disable_tqdm=True)


TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    rows = [{"question": f"{n} + 1?", "choices": [str(n + 1), str(n)], "answer": n % 2} for n in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.yaml").write_text(TASK.format(name="little_sums", rows=tmp_path / "rows.jsonl"))
    return tmp_path / "sums.yaml"


def test_a_task_of_ones_own(task: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--model", "debug:llama", "--tasks", str(task), "--limit", "4", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)["tasks"]["little_sums"]
    assert told["samples"] == 4
    assert 0 <= told["acc"] <= 1
    assert told["acc_stderr"] > 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere.yaml", "nowhere.yaml: it cannot be read: No such file or directory; name a task file"),
        ("arc_eazy", "--tasks: there is no task 'arc_eazy'; did you mean 'arc_easy'?"),
    ],
)
def test_what_is_no_task_is_named(name: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--model", "debug:llama", "--tasks", name]) == 2
    assert capfd.readouterr().err.strip() == f"error: {said}"
