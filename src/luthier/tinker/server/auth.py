"""Keys: who asks. Only digests are kept; a key is shown once, when it is made."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import secrets
import time

import sqlalchemy as sql
from sqlalchemy.exc import IntegrityError

from luthier.errors import ConfigError
from luthier.tinker.server.store import Store, keys

_PREFIX = "tml-"  # the SDK takes no other
_FRESH = 1.0
"""Seconds that the list of keys is believed for."""


def digest_of(key: str) -> str:
    """What is kept of a key. Keys are 256 random bits, so no slow hash is needed."""
    return hashlib.sha256(key.encode()).hexdigest()


def add_key(store: Store, name: str) -> str:
    """Make a key.

    Returns:
        the key, which is nowhere else.

    Raises:
        ConfigError: there is one of this name.
    """
    if not re.fullmatch(r"[\w.@\-]{1,64}", name):
        raise ConfigError(f"{name!r} cannot be a key's name", where="NAME", remedy="use letters, digits and . @ _ -")
    key = _PREFIX + secrets.token_urlsafe(32)
    row = {"name": name, "digest": digest_of(key), "created": time.time()}
    try:
        store.now(lambda connection: connection.execute(keys.insert().values(row)))
    except IntegrityError:
        remedy = f"remove it first: luthier serve keys remove {name}"
        raise ConfigError(f"there is a key named {name!r}", where="NAME", remedy=remedy) from None
    return key


def list_keys(store: Store) -> list[tuple[str, float]]:
    """Names, and when each was made in seconds since the epoch."""
    rows = store.now(lambda connection: connection.execute(sql.select(keys.c.name, keys.c.created)).all())
    return [(str(name), float(created)) for name, created in rows]


def remove_key(store: Store, name: str) -> None:
    """Let a key open nothing any more.

    Raises:
        ConfigError: there is none of this name.
    """
    found = store.now(lambda connection: connection.execute(keys.delete().where(keys.c.name == name)).rowcount)
    if not found:
        raise ConfigError(f"there is no key named {name!r}", where="NAME", remedy="luthier serve keys list")


class Doorkeeper:
    """Tells who asks.

    Args:
        store: where keys are.
        open_house: take any key until one is made; for a server that only this machine reaches.
    """

    def __init__(self, store: Store, *, open_house: bool) -> None:
        self._store = store
        self._open_house = open_house
        self._known: set[str] = set()
        self._read = -math.inf
        self._reading = asyncio.Lock()

    async def owner(self, key: str | None) -> str | None:
        """Whose the key is: the digest of it; None where it opens nothing."""
        if not key:
            return None
        async with self._reading:
            if time.monotonic() - self._read > _FRESH:
                rows = await self._store.run(lambda connection: connection.execute(sql.select(keys.c.digest)).all())
                self._known, self._read = {str(digest) for (digest,) in rows}, time.monotonic()
        digest = digest_of(key)
        return digest if digest in self._known or (self._open_house and not self._known) else None
