"""The server's books: what must outlive a `kill -9`, in SQLite or PostgreSQL.

One thread writes and reads, in transactions. What is asked often is answered from memory; nobody who waits for a result
holds a connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sql
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from luthier.errors import ConfigError, first_line
from luthier.tinker.server.records import Checkpoint, Model, Operation, Sampler, Session, kept_fields

Result = TypeVar("Result")
_PATIENCE = 30.0
"""Seconds that a database may be away without anybody noticing."""

metadata = sql.MetaData()
_COLUMNS: dict[Any, Any] = {str: sql.String, float: sql.Float, int: sql.BigInteger, bool: sql.Boolean, dict: sql.JSON}


def _table(name: str, record: type, keys: tuple[str, ...], *more: sql.Column[Any]) -> sql.Table:
    """The table of a record: a column for each field that is kept.

    Args:
        keys: the fields that tell its rows apart.
        more: columns that are no fields.
    """
    columns = [
        sql.Column(field, _COLUMNS[kind], primary_key=field in keys, nullable=optional, index=field == "line")
        for field, kind, optional in kept_fields(record)
    ]
    return sql.Table(name, metadata, *columns, *more)


sessions = _table("sessions", Session, ("id",))
models = _table("models", Model, ("id",))
samplers = _table("samplers", Sampler, ("id",))
checkpoints = _table("checkpoints", Checkpoint, ("model_id", "kind", "name"))
operations = _table(
    "operations",
    Operation,
    ("id",),
    sql.Column("fetched", sql.Float),  # when its result was first handed out
    sql.Column("payload", sql.LargeBinary),  # last: SQLite reads all that lies before a column
    sql.Column("result", sql.LargeBinary),
)
keys = sql.Table(
    "keys",
    metadata,
    sql.Column("name", sql.String, primary_key=True),
    sql.Column("digest", sql.String, nullable=False, unique=True),
    sql.Column("created", sql.Float, nullable=False),
)

_TABLES: dict[type, sql.Table] = {
    Session: sessions,
    Model: models,
    Sampler: samplers,
    Checkpoint: checkpoints,
    Operation: operations,
}
_NAMES = {record: [name for name, _, _ in kept_fields(record)] for record in _TABLES}
"""The fields of each record that are columns."""


def database_of(directory: Path, database: str | None) -> str:
    """The URL of the books."""
    if database is not None:
        return database
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    (directory / "books.sqlite").touch(mode=0o600)
    return f"sqlite:///{(directory / 'books.sqlite').resolve()}"


class Store:
    """A database.

    Args:
        url: SQLAlchemy's, "sqlite:////path/to/file" or "postgresql://user@host/name".

    Raises:
        ConfigError: it cannot be reached, or is none of the two.
    """

    def __init__(self, url: str) -> None:
        try:
            parsed = sql.make_url(url)
            self._where = parsed.render_as_string(hide_password=True)
            if parsed.get_backend_name() == "postgresql":
                parsed = parsed.set(drivername="postgresql+psycopg")
            elif parsed.get_backend_name() != "sqlite":
                what = f"{parsed.get_backend_name()} is not among the databases that are tested"
                raise ConfigError(what, where="--database", remedy="use sqlite or postgresql")
            self._engine = sql.create_engine(
                parsed,
                pool_size=1,
                max_overflow=0,
                pool_pre_ping=True,
                hide_parameters=True,  # errors are logged, and what clients sent is nobody's business
            )
            if parsed.get_backend_name() == "sqlite":
                sql.event.listen(self._engine, "connect", _prepare)
            metadata.create_all(self._engine)
        except (SQLAlchemyError, ImportError, ValueError) as error:
            raise ConfigError(
                f"the database cannot be used ({first_line(error)})", where="--database", remedy="check its URL"
            ) from None
        self._thread = ThreadPoolExecutor(1, "store")

    async def run(self, work: Callable[[sql.Connection], Result]) -> Result:
        """Do something in a transaction, off the event loop; after whatever was begun before."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.now, work)

    def now(self, work: Callable[[sql.Connection], Result]) -> Result:
        """Do something in a transaction at once. A PostgreSQL that is away is waited for; as nobody knows what came
        through before it went, all that is done can be done twice."""
        end, pause = time.monotonic() + _PATIENCE, 0.1
        while True:
            try:
                with self._engine.begin() as connection:
                    return work(connection)
            except OperationalError:
                if self._engine.dialect.name == "sqlite" or time.monotonic() > end:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    def close(self) -> None:
        """Finish what was begun, and let go."""
        self._thread.shutdown()
        self._engine.dispose()


def _prepare(connection: Any, record: object) -> None:
    """Readers beside a writer; what was committed outlives the process (not a power cut, which may take the last)."""
    cursor = connection.cursor()
    for line in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=30000"):
        cursor.execute(f"PRAGMA {line}")
    cursor.close()


def row_of(record: Any) -> dict[str, Any]:
    """The columns of a record."""
    return {name: getattr(record, name) for name in _NAMES[type(record)]}


def replace(connection: sql.Connection, record: Any, **more: Any) -> None:
    """Enter a record in the place of the one with its key, so that it can be entered twice where nobody knows whether
    the first time came through.

    Args:
        more: columns that are no fields of it.
    """
    table = _TABLES[type(record)]
    row = row_of(record) | more
    connection.execute(table.delete().where(*(column == row[column.name] for column in table.primary_key)))
    connection.execute(table.insert().values(row))


def delete(connection: sql.Connection, record: Any) -> None:
    """Strike a record out."""
    table = _TABLES[type(record)]
    connection.execute(table.delete().where(*(column == getattr(record, column.name) for column in table.primary_key)))


def enter_snapshot(connection: sql.Connection, model_id: str, number: int) -> None:
    """A model can be brought back as it was after its operation of this number; what was sent up to then can go."""
    connection.execute(models.update().where(models.c.id == model_id).values(snapshot=number))
    done = (operations.c.line == model_id) & (operations.c.number <= number)
    connection.execute(operations.update().where(done).values(payload=None))


def load(connection: sql.Connection, kind: type[Result], *where: sql.ColumnElement[bool]) -> list[Result]:
    """Records of a kind; operations without what was sent and given."""
    table = _TABLES[kind]
    names = _NAMES[kind]
    rows = connection.execute(sql.select(*(table.c[name] for name in names)).where(*where))
    return [kind(**dict(zip(names, row, strict=True))) for row in rows]
