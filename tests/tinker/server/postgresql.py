"""A PostgreSQL of the tests' own for as long as a command runs: Debian's `postgresql`, in a temporary directory.

    python -m tests.tinker.server.postgresql COMMAND...

The command finds its URL in LUTHIER_TEST_DATABASE; each server of the tests then has a database of its own there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import sqlalchemy as sql

VARIABLE = "LUTHIER_TEST_DATABASE"


def database_for(directory: Path) -> str | None:
    """The URL of the database of a server in a directory, made where it is missing; None where SQLite is to be used."""
    given = os.environ.get(VARIABLE)
    if given is None:
        return None
    url = sql.make_url(given)
    name = "server_" + hashlib.sha256(str(directory).encode()).hexdigest()[:24]
    engine = sql.create_engine(url.set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        known = connection.execute(sql.text("SELECT 1 FROM pg_database WHERE datname = :name"), {"name": name})
        if known.scalar_one_or_none() is None:
            connection.execute(sql.text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return url.set(database=name).render_as_string()


def options_for(directory: Path) -> list[str]:
    """The same as arguments of `luthier serve`."""
    url = database_for(directory)
    return [] if url is None else ["--database", url]


def main(command: list[str]) -> int:
    """Run a command with a PostgreSQL beside it; returns what it left with."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    binary = found[-1] if found else Path(shutil.which("initdb") or "initdb")
    # PostgreSQL refuses to run as root
    user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    with tempfile.TemporaryDirectory() as room:
        if user:
            shutil.chown(room, "postgres")
        data = f"{room}/data"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        settings = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={room} -c fsync=off"
        control = [*user, str(binary.with_name("pg_ctl")), "-D", data, "-w", "-s", "-l", f"{room}/log"]
        initialise = [*user, str(binary), "-D", data, "-U", "luthier", "-A", "trust", "-E", "UTF8", "--no-sync"]
        subprocess.run(initialise, check=True, stdout=subprocess.DEVNULL, cwd=room)
        subprocess.run([*control, "-o", settings, "start"], check=True, cwd=room)
        try:
            url = f"postgresql://luthier@127.0.0.1:{port}/postgres"
            return subprocess.run(command, env=os.environ | {VARIABLE: url}).returncode
        finally:
            subprocess.run([*control, "-m", "fast", "stop"], check=True, cwd=room)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
