"""The command starts light, and whatever goes wrong is one sentence and an exit code."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from luthier import __version__
from luthier.cli.border import Border
from luthier.cli.main import VERBS, main

HEAVY = ("torch", "transformers", "datasets", "numpy", "pydantic", "rich")


def run(*words: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "luthier", *words]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from luthier.cli.main import main; code = main(['--help']);"
        f"print([m for m in {HEAVY!r} if m in sys.modules], [m for m in sys.modules if 'luthier.cli.' in m], code)"
    )
    answer = run(code=code)
    *page, last = answer.stdout.splitlines()
    assert last == "[] ['luthier.cli.frame', 'luthier.cli.border', 'luthier.cli.main'] 0"
    assert all(any(line.strip().startswith(name) for line in page) for name in VERBS)


def test_the_help_of_every_verb_imports_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys; from luthier.cli.main import VERBS, main; codes = [main([verb, '--help']) for verb in VERBS];"
        "print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules], set(codes))"
    )
    assert run(code=code).stdout.splitlines()[-1] == "[] {0}"


@pytest.mark.parametrize("words", [["data", "show", "--help"], ["plot", "schedule", "--help"]])
def test_verbs_of_two_words(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert f"Usage: luthier {words[0]} {words[1]}" in capsys.readouterr().out


def test_version_and_help_without_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"
    assert main([]) == 0
    assert "Commands:" in capsys.readouterr().out


MISTAKES = [
    (["trian"], "luthier: No such command 'trian'. Did you mean 'train'? (see luthier --help)"),
    (
        ["train", "--modle", "m"],
        "luthier train: No such option: --modle (Possible options: --model, --nnodes) (see luthier train --help)",
    ),
    (
        ["train", "--resume=sometimes"],
        "luthier train: Invalid value for '--resume': 'sometimes' is not one of 'auto', 'never', 'must' "
        "(see luthier train --help)",
    ),
    (["export", "run"], "luthier export: Missing option '--output' (see luthier export --help)"),
    (
        ["export", "run", "--output=o", "--merge", "--adapter"],
        "--merge and --adapter exclude each other; leave one of them out",
    ),
    (["data"], "luthier data: Missing command (see luthier data --help)"),
    (["train", "none.yaml"], "none.yaml: there is no such file"),
    (["train", "--model=m", "--data=d", "train.steps=many"], 'command line: train.steps: "many" is not a whole number'),
    (
        ["train", "--model=m", "--data=d", "learning_rate=1"],
        "command line: learning_rate: is not a known key; did you mean optimizer.learning_rate?",
    ),
    (
        ["train", "--data=d"],
        "command line: model: is missing; give it as `model: ...` in the file or as --model",
    ),
    (["train", "--model=m", "--data=d", "c.yaml", "d.yaml"], None),
    (["plot", "schedule"], "train.steps: is missing; give --steps, since epochs have no fixed length"),
]


@pytest.mark.parametrize(("words", "sentence"), MISTAKES)
def test_mistakes_are_one_sentence(
    words: list[str],
    sentence: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("seed: 1\n")
    sentence = sentence or 'command line: "d.yaml" is not an override; write key.path=value'
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: {sentence}\n"


@pytest.mark.parametrize(("words", "sentence"), MISTAKES)
def test_mistakes_as_json(
    words: list[str],
    sentence: str | None,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("seed: 1\n")
    assert main([*words, "--json"]) == 2
    out, err = capfd.readouterr()
    error = json.loads(out)["error"]
    assert out.count("\n") == 1
    if words != ["data"]:  # which does not get as far as to know --json
        assert error["message"] == (sentence or error["message"])
    assert err == f"error: {error['message']}\n"


def test_the_process_leaves_with_2_and_no_traceback() -> None:
    answer = run("train", "none.yaml")
    assert (answer.returncode, answer.stdout, answer.stderr) == (2, "", "error: none.yaml: there is no such file\n")


def test_an_interruption_leaves_with_130(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    class Interrupted(io.StringIO):
        def read(self, size: int | None = -1) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Interrupted())
    assert main(["generate", "--model=debug:llama"]) == 130
    assert main(["generate", "--model=debug:llama", "--json"]) == 130
    out, err = capfd.readouterr()
    assert "Traceback" not in err
    assert [json.loads(line)["error"]["kind"] for line in out.splitlines()] == ["Interrupted"]


def test_a_sigterm_before_the_first_step_leaves_with_143(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from luthier.recipes import sft

    def ended(*_: object, **__: object) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(sft, "train", ended)
    assert main(["train", "--model=debug:llama", "--data=rows.jsonl", "--json"]) == 143
    assert json.loads(capfd.readouterr().out)["error"]["kind"] == "Interrupted"


def test_json_keeps_standard_output_to_itself() -> None:
    """Libraries that print, even past Python's own sys.stdout, do not get between."""
    code = """
import os, sys
from luthier.cli import main, plot
from luthier.cli.frame import Answer, JsonOption

def noisy(as_json: JsonOption = False) -> Answer:
    print("from Python")
    os.write(1, b"from C\\n")
    return Answer({"loss": float("nan"), "rows": (1, 2)})

plot.app.registered_commands.clear()
plot.app.command("schedule")(noisy)
code = main.main(["plot", "schedule", "--json"])
print("after")
sys.exit(code)
"""
    answer = run(code=code)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == '{"loss": null, "rows": [1, 2]}\nafter\n'
    assert sorted(answer.stderr.splitlines()) == ["from C", "from Python"]


def test_a_fault_of_our_own_shows_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("luthier.cli.plot.drawing", lambda rates: 1 / 0)
    assert main(["plot", "schedule", "--steps=3"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.endswith("ZeroDivisionError: division by zero\n")
    assert main(["plot", "schedule", "--steps=3", "--json"]) == 1
    out, err = capfd.readouterr()
    assert json.loads(out)["error"] == {"kind": "InternalError", "message": "ZeroDivisionError: division by zero"}
    assert "Traceback" in err


def test_a_name_that_is_not_utf8_is_escaped_in_json(tmp_path: Path) -> None:
    words = ["train", b"none\xff.yaml", "--json"]
    done = subprocess.run([sys.executable, "-m", "luthier", *words], capture_output=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["where"] == "none\udcff.yaml"
    assert b"Traceback" not in done.stderr


def test_a_prompt_that_is_not_utf8_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "debug:llama", "--prompt", "caf\udce9"]) == 2
    assert capsys.readouterr().err == "error: --prompt: is not UTF-8 text; give it as UTF-8\n"


def test_a_full_disk_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import luthier.config

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(luthier.config, "load_config", full)
    assert main(["train", "run.yaml", "--json"]) == 2
    answer = capsys.readouterr()
    assert answer.err == "error: the disk: No space left on device; free some space\n"


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_stream_that_is_closed_is_an_empty_one(tmp_path: Path, closed: tuple[int, ...]) -> None:
    """As `<&-` and some supervisors leave it: no traceback, and no file takes its number and what is meant for it."""
    code = (
        f"import os, sys\nfor number in {closed}: os.close(number)\n"
        f"sys.stdin, sys.stdout, sys.stderr = [None if n in {closed} else s"
        " for n, s in enumerate((sys.stdin, sys.stdout, sys.stderr))]\n"
        "from luthier.cli.main import main\n"
        "codes = [main(['validate', 'model=m', 'data=d', '--json']), main(['generate', '--model=m'])]\n"
        f"file = open({str(tmp_path / 'codes')!r}, 'w')\n"
        "print(*codes, file.fileno() > 2, file=file)"
    )
    done = run(code=code)
    assert (tmp_path / "codes").read_text() == "0 2 True\n"
    assert ("valid" in done.stdout) == (1 not in closed)
    assert ("nothing to answer" in done.stderr) == (2 not in closed)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["validate", "model=m", "data=d"], ["validate", "none.yaml"]])
def test_an_answer_that_cannot_be_written_is_a_sentence(words: list[str]) -> None:
    # buffered as Python does it, which writes again at exit
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "luthier", *words, "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    told = "none.yaml: there is no" if "none.yaml" in words else "the disk: No space left on device; free some space"
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {told}")
    assert done.stderr.count("\n") == 1
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, env=environment)
    assert done.returncode == (2 if "none.yaml" in words else 0)


def test_a_character_that_the_terminal_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    assert main(["validate", "model=m", "data=d", "output=Käse"]) == 0
    assert b"output: K\\xe4se" in screen.buffer.getvalue()


def test_an_error_of_a_log_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    Border(as_json=False).fail("j: has failed:\nerror: rows.jsonl:3: is not JSON", {}, "JobFailedError", 2, sys.stdout)
    assert capsys.readouterr().err == "error: j: has failed:\nerror: rows.jsonl:3: is not JSON\n"
