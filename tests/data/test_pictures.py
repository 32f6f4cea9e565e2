"""Rows with images: where they come from, what they become, and what is refused, named with its row."""

import base64
import io
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from luthier.config import DataConfig, SourceConfig
from luthier.data.cache import cache_directory
from luthier.data.loader import Rows, build_rows, pack
from luthier.data.show import render_row, tokens_of
from luthier.errors import DataError
from luthier.hf.source import resolve
from luthier.hf.tokenizer import load_tokenizer
from luthier.hf.vision.processor import open_eyes

TALK = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "A dot."}]


def tokenizer_of(model: str = "debug:llava") -> Any:
    source = resolve(model)
    tokenizer = load_tokenizer(source)
    open_eyes(source, tokenizer)
    return tokenizer


def png(colour: tuple[int, int, int] = (200, 10, 10), size: tuple[int, int] = (28, 28)) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, colour).save(stream, format="PNG")
    return stream.getvalue()


def write(directory: Path, rows: list[dict[str, Any]]) -> Path:
    (directory / "dot.png").write_bytes(png())
    (directory / "other.png").write_bytes(png((10, 10, 200)))
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def read(file: Path, model: str = "debug:llava", *, data: dict[str, Any] | None = None, **source: Any) -> Rows:
    config = DataConfig(train=[SourceConfig(path=str(file), **source)], **(data or {}))
    rows = build_rows(config, "train", tokenizer_of(model))
    assert isinstance(rows, Rows)
    return rows


def text_of(rows: Rows, index: int = 0) -> str:
    return "".join(str(token["text"]) for token in tokens_of(rows[index], rows.sight.processor.tokenizer))  # type: ignore[union-attr]


FORMS: dict[str, dict[str, Any]] = {
    "column": {"images": ["dot.png"], "messages": TALK},
    "one": {"image": "dot.png", "messages": TALK},
    "features": {"images": [{"path": "dot.png", "bytes": None}], "messages": TALK},
    "base64": {"images": [f"data:image/png;base64,{base64.b64encode(png()).decode()}"], "messages": TALK},
    "part": {
        "images": ["dot.png"],
        "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
            TALK[1],
        ],
    },
    "part with its own": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "path": "dot.png"}, {"type": "text", "text": "What is it?"}],
            },
            TALK[1],
        ],
    },
    "openai": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "dot.png"}},
                    {"type": "text", "text": "What is it?"},
                ],
            },
            TALK[1],
        ],
    },
    "json": {"images": ["dot.png"], "messages": json.dumps(TALK)},
    "sharegpt": {
        "image": "dot.png",
        "conversations": [{"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": "A dot."}],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_row_is_the_same_row(form: str, tmp_path: Path) -> None:
    file = write(tmp_path, [FORMS["column"], FORMS[form]])
    rows = read(file)
    first, second = rows[0], rows[1]
    assert np.array_equal(first.tokens, second.tokens)
    assert np.array_equal(first.weights, second.weights)
    assert [picture.digest for picture in first.pictures] == [picture.digest for picture in second.pictures]
    seen = [pack([sample], rows.sight).sights for sample in (first, second)]
    left, right = (inputs() for inputs in seen if inputs is not None)
    assert (left["pixel_values"] == right["pixel_values"]).all()
    assert left["pixel_values"].shape == (1, 3, 28, 28)


def test_prompt_and_completion_may_have_images(tmp_path: Path) -> None:
    rows = read(write(tmp_path, [{"images": ["dot.png"], "prompt": "<image>It is", "completion": " a dot."}]))
    assert text_of(rows) == "<image>x4It is a dot.<|endoftext|>"
    trained = rows[0].targets[rows[0].weights > 0]
    assert rows.sight.processor.tokenizer.decode(trained) == " a dot.<|endoftext|>"  # type: ignore[union-attr]


def test_images_out_of_a_table_are_kept_under_their_digest(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([{"images": [{"bytes": png(), "path": None}], "messages": TALK}])
    pq.write_table(table, tmp_path / "rows.parquet")
    rows = read(tmp_path / "rows.parquet")
    (picture,) = rows[0].pictures
    assert Path(picture.path).is_relative_to(cache_directory() / "images")
    assert Path(picture.path).read_bytes() == png()
    held = read(tmp_path / "rows.parquet", data={"cache": False})[0].pictures[0]
    assert (held.data, held.digest) == (png(), picture.digest)


def test_tokens_of_images_are_never_trained_on(tmp_path: Path) -> None:
    talk = [*TALK, {"role": "user", "content": "And <image>?"}, {"role": "assistant", "content": "Another."}]
    file = write(tmp_path, [{"images": ["dot.png", "other.png"], "messages": talk}])
    for model in ("debug:llava", "debug:smolvlm", "debug:gemma3", "debug:qwen2_5_vl", "debug:mllama"):
        rows = read(file, model, train_on_input=True)
        assert rows.sight is not None
        sample = rows[0]
        own = np.isin(sample.targets, list(rows.sight.ids))
        assert own.any()
        assert not sample.weights[own].any()
        assert sample.weights[~own].mean() > 0.5


def test_several_images_keep_the_order_of_their_tags(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "<image> or <image>"}, {"role": "assistant", "content": "The first."}]
    rows = read(write(tmp_path, [{"images": ["other.png", "dot.png"], "messages": talk}]))
    assert [Path(picture.path).name for picture in rows[0].pictures] == ["other.png", "dot.png"]
    assert "<image>x4 or <image>x4<|im_end|>" in text_of(rows)
    shown = render_row(rows[0], rows.sight.processor.tokenizer).plain  # type: ignore[union-attr]
    assert "other.png\nimage" in shown
    assert "<image>x4" in shown


def test_text_alone_is_read_beside_images(tmp_path: Path) -> None:
    plain = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    rows = read(write(tmp_path, [{"images": None, "messages": plain}, FORMS["column"], {"messages": plain}]))
    assert [len(rows[index].pictures) for index in range(3)] == [0, 1, 0]
    assert pack([rows[0]], rows.sight).sights is None


def deep(mode: str) -> str:
    """An address that holds an image whose numbers are wider than a byte."""
    stream = io.BytesIO()
    Image.new(mode, (4, 4)).save(stream, format="TIFF")
    return f"data:image/tiff;base64,{base64.b64encode(stream.getvalue()).decode()}"


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "a tag without an image": ({"images": [], "messages": TALK}, "there are 1 image tags and 0 images"),
    "a tag too many": (
        {"images": ["dot.png"], "messages": [{**TALK[0], "content": "<image><image>?"}, TALK[1]]},
        "there are 2 image tags and 1 image ",
    ),
    "an image without a tag": (
        {"images": ["dot.png", "other.png"], "messages": TALK},
        "there are 2 images in column 'images' and 1 tags for them",
    ),
    "a missing file": ({"images": ["none.png"], "messages": TALK}, r"image 1 \(none.png\) is not there"),
    "no image": ({"images": ["rows.jsonl"], "messages": TALK}, "cannot be opened as an image"),
    "half an image": (
        {
            "images": [f"data:image/png;base64,{base64.b64encode(png((1, 2, 3), (64, 64))[:100]).decode()}"],
            "messages": TALK,
        },
        "cannot be opened as an image",
    ),
    "sixteen bits": ({"images": [deep("I;16")], "messages": TALK}, r"more than 8 bits a colour \(I;16\); save it in 8"),
    "floats": ({"images": [deep("F")], "messages": TALK}, r"more than 8 bits a colour \(F\); save it in 8"),
    "no base64": ({"images": ["data:image/png;base64,!"], "messages": TALK}, "is no data: address"),
    "a number": ({"images": [3], "messages": TALK}, "image 1 is int, and no path"),
    "outside": ({"images": ["../dot.png"], "messages": TALK}, r"image 1 \(\.\./dot\.png\) lies outside"),
    "outside, absolute": ({"images": ["/etc/hostname"], "messages": TALK}, "lies outside"),
    "an address": ({"images": ["http://localhost:1/dot.png"], "messages": TALK}, "is an address .* none may be asked"),
    "a model's own token": (
        {"images": ["dot.png"], "messages": [TALK[0], {"role": "assistant", "content": "<image>"}]},
        "there are 2 image tags and 1 image ",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_is_wrong_is_named_with_its_row(fault: str, tmp_path: Path) -> None:
    row, words = BROKEN[fault]
    file = write(tmp_path, [FORMS["column"], row])
    with pytest.raises(DataError, match=words) as caught:
        read(file)
    assert caught.value.where == f"{file}:2"
    rows = read(file, data={"on_bad_row": "skip"})
    assert (len(rows), rows.report.skipped_rows) == (1, 1)


def test_tokens_that_stand_for_images_are_no_text(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Say <image_soft_token>"}, {"role": "assistant", "content": "No."}]
    file = write(tmp_path, [{"messages": talk}])
    with pytest.raises(DataError, match="there are 1 tokens for 0 that its 0 images make") as caught:
        read(file, "debug:gemma3")
    assert caught.value.where == f"{file}:1"


def test_a_model_without_eyes_refuses_images(tmp_path: Path) -> None:
    file = write(tmp_path, [{"messages": [TALK[1]]}, FORMS["column"]])
    with pytest.raises(DataError, match="column 'images' holds images, and the model reads none") as caught:
        read(file, "debug:llama", data={"on_bad_row": "raise"})
    assert caught.value.where == f"{file}:2"
    with pytest.raises(DataError, match="'image'; only text can be trained on"):
        read(write(tmp_path, [FORMS["part with its own"]]), "debug:llama")


def test_a_column_of_another_meaning_is_left_alone(tmp_path: Path) -> None:
    plain = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    assert len(read(write(tmp_path, [{"image": "a caption", "messages": plain}]), "debug:llama")) == 1


def test_images_lie_where_the_source_says(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "far.png").write_bytes(png())
    (tmp_path / "data").mkdir()
    file = write(tmp_path / "data", [{"shown": ["far.png"], "messages": TALK}])
    rows = read(file, image_root=str(tmp_path / "pictures"), image_column="shown")
    assert rows[0].pictures[0].path == str(tmp_path / "pictures" / "far.png")


def test_rows_are_cut_only_where_no_image_is(tmp_path: Path) -> None:
    long = [TALK[0], {"role": "assistant", "content": "A dot. " * 40}]
    file = write(tmp_path, [{"images": ["dot.png"], "messages": long}])
    whole = read(file, data={"sequence_length": 512})[0]
    rows = read(file, data={"sequence_length": 40})
    assert np.array_equal(rows[0].tokens, whole.tokens[:40])
    assert rows[0].pictures == whole.pictures
    for too_long, length in (("truncate", 6), ("split", 40)):
        with pytest.raises(DataError, match="its images would be cut") as caught:
            read(file, data={"sequence_length": length, "too_long": too_long})
        assert caught.value.where == f"{file}:1"


def test_rows_are_tokenised_again_when_an_image_has_changed(tmp_path: Path) -> None:
    file = write(tmp_path, [FORMS["column"]])
    before = read(file, "debug:qwen2_5_vl")
    assert read(file, "debug:qwen2_5_vl").fingerprint == before.fingerprint
    (tmp_path / "dot.png").write_bytes(png(size=(28, 56)))
    inputs = pack([before[0]], before.sight).sights
    assert inputs is not None
    with pytest.raises(DataError, match="is not what it was when the row was tokenised") as caught:
        inputs()
    assert caught.value.where == f"{file}:1"
    after = read(file, "debug:qwen2_5_vl")
    assert len(after[0]) > len(before[0])
    assert after.fingerprint != before.fingerprint
    (tmp_path / "dot.png").unlink()
    with pytest.raises(DataError, match="is not there"):
        read(file, "debug:qwen2_5_vl")


def test_no_pixels_are_kept(tmp_path: Path) -> None:
    (tmp_path / "big.png").write_bytes(png(size=(2000, 2000)))
    rows = read(write(tmp_path, [{"images": ["big.png"], "messages": TALK}]))
    kept = sum(file.stat().st_size for file in cache_directory().rglob("*") if file.is_file())
    assert kept < 5_000
    assert rows[0].pictures[0].path == str(tmp_path / "big.png")


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if self.path == "/away.png":
                self.send_response(302)
                self.send_header("Location", "file:///etc/hostname")
                self.end_headers()
                return
            found = self.path in ("/dot.png", "/moved.png")
            if self.path == "/moved.png":
                self.send_response(302)
                self.send_header("Location", "/dot.png")
                self.end_headers()
                return
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(png() if found else b"nothing")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}", asked
        httpd.shutdown()
        thread.join()


def test_addresses_are_asked_by_permission_alone(server: tuple[str, list[str]], tmp_path: Path) -> None:
    url, asked = server
    file = write(tmp_path, [{"images": [f"{url}/dot.png"], "messages": TALK}])
    with pytest.raises(DataError, match="none may be asked") as caught:
        read(file)
    assert (caught.value.where, asked) == (f"{file}:1", [])
    assert "allow_urls" in str(caught.value)
    rows = read(file, allow_urls=True)
    assert asked == ["/dot.png"]
    inputs = pack([rows[0]], rows.sight).sights
    assert inputs is not None
    inputs()
    read(file, allow_urls=True)
    assert asked == ["/dot.png"]  # once, while rows were tokenised
    moved = write(tmp_path, [{"images": [f"{url}/moved.png"], "messages": TALK}])
    assert read(moved, allow_urls=True)[0].pictures == rows[0].pictures


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{}/none.png", "cannot be fetched"),
        ("{}/away.png", "cannot be fetched"),
        ("ftp://localhost/dot.png", "at no address of http or https"),
        ("http://127.0.0.1:1/dot.png", "cannot be fetched"),
    ],
)
def test_what_cannot_be_fetched_is_named(server: tuple[str, list[str]], name: str, words: str, tmp_path: Path) -> None:
    file = write(tmp_path, [FORMS["column"], {"images": [name.format(server[0])], "messages": TALK}])
    with pytest.raises(DataError, match=words) as caught:
        read(file, allow_urls=True)
    assert caught.value.where == f"{file}:2"
    assert re.search(r"image 1 \(", caught.value.what)


def test_a_file_that_trickles_is_given_up(
    server: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("luthier.data.fetch.IN_ALL", 0)
    file = write(tmp_path, [{"images": [f"{server[0]}/dot.png"], "messages": TALK}])
    with pytest.raises(DataError, match="it takes over 0 seconds"):
        read(file, allow_urls=True)
