"""The worker learns that the server is gone, however it went."""

from __future__ import annotations

import socket
from pathlib import Path
from threading import Event

import pytest

from luthier.tinker.server.link import WorkerEnd


@pytest.mark.parametrize("sent", [b"", b"half"])
@pytest.mark.parametrize("unread", [False, True])
def test_the_end_of_the_server_is_noticed(tmp_path: Path, sent: bytes, unread: bool) -> None:
    gone = Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        worker = WorkerEnd(tmp_path / "s", closed=gone.set)
        server, _ = listener.accept()
    server.sendall(sent)
    if unread:  # the kernel resets a connection that is closed with something left to read
        worker.send({"id": "1"}, b"x" * 1000)
    server.close()
    assert gone.wait(30)
    worker.close()
