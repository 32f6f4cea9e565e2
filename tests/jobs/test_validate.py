"""What is seen of rows, models and layouts before a job starts; unknown fields of a YAML."""

from __future__ import annotations

import gzip
import json
from itertools import product

import pyarrow
import pyarrow.parquet
import pytest

from luthier.config import ParallelConfig
from luthier.data.formats import chat, instruct
from luthier.errors import ConfigError
from luthier.jobs import (
    BuiltinTrainer,
    DatasetInitializer,
    Initializer,
    LuthierConfig,
    ModelInitializer,
    TorchTuneChatDataset,
    TorchTuneConfig,
    TorchTuneInstructDataset,
    columns,
)
from luthier.jobs.asked import Asked
from luthier.jobs.build import build
from luthier.jobs.runtimes import builtin
from luthier.jobs.validate import check_layout
from luthier.parallel.layout import Layout

ROW = {"question": "a?", "answer": "b"}


def jsonl(path):
    path.write_text(json.dumps(ROW) + "\n")


def array(path):
    path.write_text(json.dumps([ROW, ROW], indent=1))


def csv(path):
    path.write_text("question;answer\na?;b\n")


def packed(path):
    path.write_bytes(gzip.compress(json.dumps(ROW).encode()))


def parquet(path):
    pyarrow.parquet.write_table(pyarrow.table({name: [text] for name, text in ROW.items()}), path)


def arrow(path):
    table = pyarrow.table({name: [text] for name, text in ROW.items()})
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


FILES = {
    "rows.jsonl": jsonl,
    "rows.json": array,
    "rows.csv": csv,
    "rows.jsonl.gz": packed,
    "data/rows.parquet": parquet,
    "rows.arrow": arrow,
}


def asked(client, place, config, **initializer):
    given = Initializer(dataset=DatasetInitializer(f"file://{place}"), **initializer)
    return client.train("luthier-smollm2-135m", given, BuiltinTrainer(config), dry_run=True)


@pytest.mark.parametrize("name", FILES)
def test_columns_of_local_rows(client, tmp_path, name):
    place = tmp_path / "set"
    (place / name).parent.mkdir(parents=True)
    FILES[name](place / name)
    rows = TorchTuneInstructDataset(column_map={"input": "question", "output": "answer"})
    asked(client, place, TorchTuneConfig(dataset_preprocess_config=rows))
    rows.column_map = {"input": "questoin", "output": "reply"}
    with pytest.raises(ConfigError) as caught:
        asked(client, place, TorchTuneConfig(dataset_preprocess_config=rows))
    at = "trainer.config.dataset_preprocess_config.column_map"
    assert str(caught.value).splitlines() == [
        f'{at}.input: the rows have no column "questoin"; did you mean "question"?',
        f'{at}.output: the rows have no column "reply"; there are answer, question',
    ]


def test_columns_of_conversations(client, tmp_path):
    jsonl(tmp_path / "rows.jsonl")
    rows = TorchTuneChatDataset(conversation_column="talk")
    with pytest.raises(ConfigError, match=r"dataset_preprocess_config.conversation_column: the rows have no column"):
        asked(client, tmp_path / "rows.jsonl", TorchTuneConfig(dataset_preprocess_config=rows))


def test_columns_of_a_yaml(client, tmp_path):
    jsonl(tmp_path / "rows.jsonl")
    data = {"train": {"path": str(tmp_path / "rows.jsonl"), "columns": {"prompt": "q", "completion": "answer"}}}
    with pytest.raises(ConfigError, match=r"trainer.config.data.train.0.columns.prompt: the rows have no column"):
        client.train("luthier-smollm2-135m", trainer=BuiltinTrainer(LuthierConfig(data=data)), dry_run=True)


@pytest.mark.parametrize(
    ("row", "config", "words"),
    [
        ({"body": "a"}, TorchTuneConfig(), "config.data.train.0: the columns of the rows (body) fit no format"),
        (
            {"text": "a", "prompt": "b", "completion": "c"},
            TorchTuneConfig(),
            "fit formats instruct and text; say",
        ),
        (
            {"body": "a"},
            TorchTuneConfig(dataset_preprocess_config=TorchTuneInstructDataset()),
            "dataset_preprocess_config: the rows have no columns of format instruct (columns: body)",
        ),
        (ROW, TorchTuneConfig(dataset_preprocess_config=TorchTuneChatDataset()), "no columns of format chat"),
        (ROW, LuthierConfig(data={"train": {"path": "dataset", "format": "text"}}), "no columns of format text"),
    ],
)
def test_rows_that_fit_no_format(client, tmp_path, row, config, words):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError) as caught:
        asked(client, tmp_path / "rows.jsonl", config)
    assert words in str(caught.value)


def test_splits_of_a_yaml(client):
    data = {"train": [{"path": "/rows", "split": "train[:1"}]}
    with pytest.raises(ConfigError, match=r'trainer.config.data.train.0.split: "train\[:1" is no split'):
        client.train("luthier-smollm2-135m", trainer=BuiltinTrainer(LuthierConfig(data=data)), dry_run=True)


def test_a_column_may_come_in_a_later_row(client, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "a", "completion": "b"}\n{"cut off')
    asked(client, tmp_path / "rows.jsonl", TorchTuneConfig())


def test_columns_are_known_as_the_nodes_know_them():
    assert set(columns.PAIRS) == {*instruct.PAIRS, *instruct.ALIASES}
    assert columns.CONVERSATIONS == chat.MESSAGE_COLUMNS


def test_only_files_of_the_kind_are_looked_at(client, tmp_path):
    (tmp_path / "a.csv").write_text("body\nx\n")
    jsonl(tmp_path / "b.jsonl")
    asked(client, tmp_path, TorchTuneConfig(dataset_preprocess_config=TorchTuneInstructDataset(source="json")))


@pytest.mark.parametrize("backend", ["local", "slurm", "kubernetes"])
def test_files_of_the_working_directory(tmp_path, monkeypatch, backend):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "rows.jsonl").write_text('{"text": "a"}')
    config = LuthierConfig(model="debug:llama", data="dataset/rows.jsonl")
    job = Asked(backend, builtin(), None, None, BuiltinTrainer(config))
    if backend == "kubernetes":
        with pytest.raises(ConfigError, match=r"config.data.train.0.path: .* is a file of this machine, which pods"):
            build(job)
        return
    assert build(job).config["data"]["train"] == [{"path": str(tmp_path / "dataset" / "rows.jsonl")}]
    (tmp_path / "model").mkdir()  # not what a preset's own model is fetched to
    preset = build(Asked(backend, builtin(), "luthier-qwen3-0.6b"))
    assert (preset.config["model"], preset.config["data"]["train"][0]["path"]) == ("model", "dataset")
    (tmp_path / "tok").mkdir()
    own = build(Asked(backend, builtin(), "luthier-qwen3-0.6b", None, BuiltinTrainer(TorchTuneConfig(tokenizer="tok"))))
    assert own.config["tokenizer"] == str(tmp_path / "tok")
    fetched = Initializer(DatasetInitializer("hf://a/b"))
    again = build(Asked(backend, builtin(), None, fetched, BuiltinTrainer(config)))
    assert again.config["data"]["train"] == [{"path": "dataset/rows.jsonl"}]


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "\x00\x01"])
def test_rows_that_cannot_be_read_are_left_to_the_nodes(client, tmp_path, content):
    (tmp_path / "rows.jsonl").write_text(content)
    rows = TorchTuneInstructDataset(column_map={"input": "q", "output": "a"})
    asked(client, tmp_path, TorchTuneConfig(dataset_preprocess_config=rows))


def test_conversations_need_a_chat_template(client, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": []}))
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer_config.json").write_text("{}")
    config = TorchTuneConfig(dataset_preprocess_config=TorchTuneChatDataset())
    place = {"model": ModelInitializer(f"file://{model}")}
    with pytest.raises(ConfigError, match=r"initializer.model.storage_uri: the model has no chat template"):
        asked(client, tmp_path / "rows.jsonl", config, **place)
    config.tokenizer = "other/tokenizer"
    asked(client, tmp_path / "rows.jsonl", config, **place)
    config.tokenizer = None
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    asked(client, tmp_path / "rows.jsonl", config, **place)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"modle": "x"}, "trainer.config.modle: is not a known key; did you mean model?"),
        ({"train": {"stps": 1}}, "trainer.config.train.stps: is not a known key; did you mean train.steps?"),
        ({"train": {"steps": "many"}}, 'trainer.config.train.steps: "many" is not a whole number'),
        ({"optimizer": {"name": "sgd", "betas": [0, 0]}}, "trainer.config.optimizer.betas: is not a known key"),
        ({"num_nodes": 0}, "trainer.config.num_nodes: must be more than 0, not 0"),
        ({"train": {"epochs": 1, "steps": 1}}, "trainer.config.train: epochs and steps exclude each other"),
    ],
)
def test_unknown_fields_of_a_config(given, words):
    with pytest.raises(ConfigError) as caught:
        LuthierConfig(**given)
    assert words in str(caught.value)


DEGREES = (-1, 1, 2, 3)


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
def test_layouts_are_refused_as_the_run_would_refuse_them(ranks):
    """Whatever `parallel` the mesh takes, the check takes, and no other."""
    for shard, replicate, tp, pp, ep in product((None, *DEGREES), DEGREES, DEGREES, (1, 2), (-1, 1, 2, 4)):
        given = {"dp_replicate": replicate, "tp": tp, "pp": pp, "ep": ep}
        given |= {"dp_shard": shard} if shard is not None else {}
        errors = []
        check_layout(given, ranks, lambda name: f"parallel.{name}", errors)
        try:
            Layout.resolve(ParallelConfig(**given), ranks)
            admitted = True
        except ConfigError:
            admitted = False
        assert (errors == []) == admitted, (given, errors)
