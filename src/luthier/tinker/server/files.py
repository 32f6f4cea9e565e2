"""Where the server keeps files, names that may become paths, and links that authenticate themselves."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, urlencode

from luthier.errors import ConfigError
from luthier.tinker.server.records import Kind

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
_KINDS: tuple[Kind, ...] = ("weights", "sampler_weights", "external_weights")
LINK_SECONDS = 3600
"""How long a link to a file works."""


def check_name(name: str) -> str:
    """The name of a checkpoint, which is that of a directory too.

    Raises:
        ConfigError: it cannot be one.
    """
    if not _NAME.fullmatch(name):
        remedy = "use up to 128 letters, digits and _ . -, not beginning with . or -"
        raise ConfigError(f"{name!r} cannot be the name of a checkpoint", where="path", remedy=remedy)
    return name


def parse_path(path: str) -> tuple[str, Kind, str]:
    """Model, kind and name of tinker://MODEL/KIND/NAME.

    Raises:
        ConfigError: it is none.
    """
    parts = path.removeprefix("tinker://").split("/")
    kind = next((kind for kind in _KINDS if len(parts) == 3 and kind == parts[1]), None)
    if not path.startswith("tinker://") or kind is None:
        raise ConfigError(f"{path!r} is no path", where="path", remedy=f"tinker://MODEL/{'|'.join(_KINDS)}/NAME is one")
    return parts[0], kind, check_name(parts[2])


class Files:
    """The server's directory.

    Args:
        root: made, for this user alone, where it is missing.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        root.chmod(0o700)
        self.root = root
        self._secret = self._own_secret()

    def checkpoint(self, model_id: str, kind: Kind, name: str) -> Path:
        """Where weights with a name lie."""
        return self.root / "checkpoints" / _safe(model_id) / kind / name

    def snapshots(self, model_id: str) -> Path:
        """Where what a model is restarted from lies, a directory for each operation that it was taken after."""
        return self.root / "snapshots" / _safe(model_id)

    def sampler(self, sampler_id: str) -> Path:
        """Where the weights of a sampler without a name lie."""
        return self.root / "samplers" / _safe(sampler_id)

    def bind(self, base: Mapping[str, str | None]) -> None:
        """Let the directory be one of models over a base: done again over another, operations would give other weights.

        Args:
            base: what tells the base from others; None for what is not known.

        Raises:
            ConfigError: it has models over another.
        """
        path = self.root / "base.json"
        if not path.exists():
            _write(path, json.dumps(base).encode())
            return
        before = json.loads(path.read_bytes())
        odd = [key for key, value in base.items() if None not in (value, before.get(key)) and value != before[key]]
        if odd:
            what = ", ".join(f"the {key} of its models' base is {before[key]}, not {base[key]}" for key in odd)
            remedy = "start it as it was started first, or give another --dir"
            raise ConfigError(what, where=str(self.root), remedy=remedy)

    def remove(self, directory: Path) -> None:
        """Take a directory away, first by name, so that nobody sees half of it."""
        doomed = self.root / "doomed" / secrets.token_hex(8)
        doomed.parent.mkdir(exist_ok=True)
        try:
            directory.rename(doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed, ignore_errors=True)

    def sweep(self) -> None:
        """Take away what a server that was killed had begun to remove."""
        shutil.rmtree(self.root / "doomed", ignore_errors=True)

    def link(self, base: str, model_id: str, name: str, file: str, expires: int) -> str:
        """A URL that fetches one file of external weights without a key, until it expires.

        Args:
            base: the server's own URL.
            expires: seconds since the epoch.
        """
        query = urlencode({"expires": expires, "signature": self._sign(model_id, name, file, expires)})
        return f"{base}/files/{quote(model_id, safe='')}/{quote(name)}/{quote(file)}?{query}"

    def linked(self, model_id: str, name: str, file: str, expires: int, signature: str) -> Path | None:
        """The file that a link means; None where the link was not made here, or has expired."""
        sound = hmac.compare_digest(self._sign(model_id, name, file, expires).encode(), signature.encode())
        if not sound or expires < time.time():
            return None
        directory = self.checkpoint(model_id, "external_weights", name).resolve()
        found = (directory / file).resolve()
        return found if found.is_relative_to(directory) and found.is_file() else None

    def _sign(self, model_id: str, name: str, file: str, expires: int) -> str:
        text = "\0".join((model_id, name, file, str(expires)))
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    def _own_secret(self) -> bytes:
        path = self.root / "secret"
        if not path.exists():
            _write(path, secrets.token_bytes(32))
        return path.read_bytes()


def _write(path: Path, content: bytes) -> None:
    """Write a file for this user alone, aside first, so that nobody sees half of it."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)


def _safe(identity: str) -> str:
    """An id as the name of a directory; ids are made here, so this is a second lock on the door."""
    if not re.fullmatch(r"[A-Za-z0-9:_\-]+", identity) or len(identity) > 200:
        raise ConfigError(f"{identity!r} is no id", where="path")
    return identity.replace(":", "_")
