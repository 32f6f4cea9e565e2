"""The application: routes over a service, and how both begin and end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from filelock import FileLock, Timeout
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from luthier.errors import ConfigError
from luthier.tinker.server.auth import Doorkeeper, list_keys
from luthier.tinker.server.files import Files
from luthier.tinker.server.http import Owner, State, TheService, install_errors
from luthier.tinker.server.metrics import Metrics
from luthier.tinker.server.process import WorkerProcess
from luthier.tinker.server.routes import checkpoints, futures, sampling, sessions, training
from luthier.tinker.server.service import Service
from luthier.tinker.server.store import Store, database_of
from luthier.tinker.server.upkeep import keep_up

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ServerConfig:
    """What a server is started with.

    Attributes:
        model: the base model, as `luthier train` takes one.
        directory: of its books and weights.
        host, port: where it listens; port 0 takes a free one.
        database: SQLAlchemy's URL; a file of SQLite in the directory when None.
        names: what else clients may call the model.
        precision, device: as `luthier train` takes them.
        tokens_per_microbatch: how many positions run at once.
        slots: how many texts grow side by side.
        parallel: how models in training are laid out over the worker's processes; None for one.
        ranks: how many processes that are.
    """

    model: str
    directory: Path
    host: str = "127.0.0.1"
    port: int = 8000
    database: str | None = None
    names: tuple[str, ...] = ()
    precision: str | None = None
    device: str | None = None
    tokens_per_microbatch: int = 2048
    slots: int = 32
    parallel: Mapping[str, Any] | None = None
    ranks: int = 1


def build_app(service: Service, doorkeeper: Doorkeeper) -> FastAPI:
    """The routes over a service that is open."""
    app = FastAPI(title="Luthier", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.luthier = State(service, doorkeeper)
    install_errors(app)
    # what is asked most is found first
    app.add_route("/api/v1/retrieve_future", futures.retrieve_future, methods=["POST"])
    for routes in (futures, sampling, training, sessions, checkpoints):
        app.include_router(routes.router, prefix="/api/v1")
    app.include_router(checkpoints.links)

    @app.get("/healthz", openapi_extra={"security": []})
    async def healthz() -> Response:
        """Whether the server is up; asks for no key and tells nothing else."""
        return Response('{"status": "ok"}', media_type="application/json")

    @app.get("/metrics")
    async def metrics(found: TheService, owner: Owner) -> Response:
        """What is counted, for Prometheus."""
        return Response(found.metrics.text(), media_type="text/plain; version=0.0.4")

    app.add_middleware(_Count, metrics=service.metrics)
    return app


async def serve(config: ServerConfig, announce: Any) -> None:
    """Serve until a signal ends it.

    Args:
        config: what to serve.
        announce: called with the URL when it listens.

    Raises:
        UserError: it cannot start; what is wrong is named.
    """
    _allow_many_connections()
    os.umask(0o077)  # weights and logs are for this user alone, wherever they are copied to
    listening = _bind(config.host, config.port)
    url = database_of(config.directory, config.database)
    files = Files(config.directory)
    with contextlib.ExitStack() as stack:
        stack.enter_context(listening)
        try:
            stack.enter_context(FileLock(config.directory / "lock", timeout=0))
        except Timeout:
            what = "another server works in it"
            raise ConfigError(what, where=str(config.directory), remedy="end that one, or give another --dir") from None
        store = Store(url)
        stack.callback(store.close)
        open_house = config.host in LOOPBACK
        if not open_house and not list_keys(store):
            what = f"{config.host} can be reached from elsewhere, and there are no keys"
            raise ConfigError(what, where="--host", remedy="make one first: luthier serve keys add NAME")
        files.sweep()
        doorkeeper = Doorkeeper(store, open_house=open_house)
        await _work(config, store, files, doorkeeper, listening, announce)


async def _work(
    config: ServerConfig,
    store: Store,
    files: Files,
    doorkeeper: Doorkeeper,
    listening: socket.socket,
    announce: Any,
) -> None:
    arguments = {
        "model": config.model,
        "precision": config.precision,
        "device": config.device,
        "tokens_per_microbatch": config.tokens_per_microbatch,
        "slots": config.slots,
        "parallel": config.parallel,
    }
    log, tokenizer = config.directory / "worker.log", config.directory / "tokenizer"
    worker = WorkerProcess(arguments, log, tokenizer, ranks=config.ranks)
    tasks: list[asyncio.Task[None]] = []
    service = Service(store, files, worker, (config.model, *config.names), Metrics())
    try:
        tasks.append(await worker.start())
        files.bind({key: worker.facts[key] for key in ("arch", "dtype", "weights")})
        await service.open()
        tasks.append(asyncio.create_task(keep_up(service)))
        await _listen(build_app(service, doorkeeper), listening, announce)
    finally:
        for task in tasks:
            task.cancel()
        await service.close()
        await worker.stop()


def _bind(host: str, port: int) -> socket.socket:
    """Take a port, before anything that takes long; clients are let in later.

    Raises:
        ConfigError: it cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        what = f"{host} port {port} cannot be had ({error.strerror})"
        raise ConfigError(what, where="--port", remedy="give another, or 0 for a free one") from None
    return found


async def _listen(app: FastAPI, listening: socket.socket, announce: Any) -> None:
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            timeout_keep_alive=75,
            backlog=4096,
            timeout_graceful_shutdown=2,
            lifespan="off",
        )
    )
    serving = asyncio.create_task(server.serve([listening]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.02)
    if server.started:
        # uvicorn would send itself the signal once more, and end before anything is put away
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, setattr, server, "should_exit", True)
        host, port = listening.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        announce(f"http://{host}:{port}")
    await serving


def _allow_many_connections() -> None:
    """As many open files as the system lets one have; each client that waits is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Count:
    """Counts responses by their status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responded(message["status"])
            await send(message)

        await self._app(scope, receive, counted)
