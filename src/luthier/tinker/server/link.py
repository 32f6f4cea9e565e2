"""Messages between the server and its worker over a local socket: a JSON head and bytes.

A frame is the length of the head and that of the payload (big-endian, 8 bytes each), the head, the payload.
"""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

_LENGTHS = struct.Struct(">QQ")

Message = tuple[dict[str, Any], bytes]
"""Head and payload."""


class LinkClosed(Exception):
    """The other end is gone."""


def _pack(head: dict[str, Any], payload: bytes) -> bytes:
    text = json.dumps(head).encode()
    return _LENGTHS.pack(len(text), len(payload)) + text + payload


class ServerEnd:
    """The server's end, on its event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, head: dict[str, Any], payload: bytes = b"") -> None:
        """Hand a message over; it leaves as fast as the worker reads."""
        self._writer.write(_pack(head, payload))

    async def receive(self) -> Message:
        """The next message.

        Raises:
            LinkClosed: the worker is gone.
        """
        try:
            head, payload = _LENGTHS.unpack(await self._reader.readexactly(_LENGTHS.size))
            text = await self._reader.readexactly(head)
            return json.loads(text), await self._reader.readexactly(payload)
        except (asyncio.IncompleteReadError, OSError):
            raise LinkClosed from None

    def close(self) -> None:
        self._writer.close()


class WorkerEnd:
    """The worker's end. A thread reads, so that the worker learns of messages, and of the server's end, while it
    computes.

    Args:
        path: of the server's socket.
        closed: called in that thread when the server is gone.
    """

    def __init__(self, path: Path, closed: Callable[[], object]) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(closed,), daemon=True).start()

    def send(self, head: dict[str, Any], payload: bytes = b"") -> None:
        """Send a message."""
        self._socket.sendall(_pack(head, payload))

    def receive(self, seconds: float) -> Message | None:
        """The next message; None where none comes within so many seconds."""
        try:
            return self._inbox.get(block=seconds > 0, timeout=seconds or None)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _read(self, closed: Callable[[], object]) -> None:
        try:
            with self._socket.makefile("rb") as stream:
                while (message := _next(stream)) is not None:
                    self._inbox.put(message)
        except OSError:  # a server that was killed before it read what was sent
            pass
        closed()


def _next(stream: BinaryIO) -> Message | None:
    """The next message; None at the end, also where that is within one."""
    lengths = stream.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    head, payload = _LENGTHS.unpack(lengths)
    text, content = stream.read(head), stream.read(payload)
    return (json.loads(text), content) if len(text) == head and len(content) == payload else None
