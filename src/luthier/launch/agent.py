"""Starting ranks: torch.distributed's elastic agent, with our logs, signals and exit codes."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, determine_local_world_size, get_args_parser, parse_min_max_nnodes

from luthier.errors import EXIT_USER_ERROR, ConfigError
from luthier.launch.logs import RankLogs
from luthier.launch.place import Request
from luthier.launch.records import Failure, Outcome, read_answer, read_failure

Say = Callable[[str], None]

# Nothing changes by trying again.
_FINAL = {EXIT_USER_ERROR, 128 + signal.SIGINT, 128 + signal.SIGTERM}


def start(
    request: Request,
    command: Sequence[str],
    logs: Path | None,
    *,
    fits: Callable[[int], object] | None = None,
    say: Say | None = None,
) -> Outcome:
    """Start the ranks of this machine, wait for them, and start them again as often as asked after a failure.

    Args:
        request: how many, and with whom.
        command: what each rank runs.
        logs: directory under which each start gets one for its ranks' logs; None keeps them only after a failure.
        fits: refuses a number of ranks that cannot be right, before any is started; asked where this machine has all.
        say: prints a failure after which the ranks are started again; on standard error when None.

    Raises:
        ConfigError: the processes cannot be started as asked, or what `fits` raises.
        KeyboardInterrupt, SystemExit: SIGINT or SIGTERM came before there were ranks.
    """
    config = _config(request)
    if fits is not None and config.max_nodes == 1:
        fits(config.nproc_per_node)
    with tempfile.TemporaryDirectory(prefix="luthier-launch-") as scratch, _quiet():
        started = f"{datetime.now():%Y-%m-%dT%H-%M-%S}-{os.uname().nodename}"
        place = (logs or Path(tempfile.gettempdir()) / "luthier-logs") / started
        rank_logs = RankLogs(place, Path(scratch))
        try:
            outcome = _run(config, command, rank_logs, say or (lambda text: print(text, file=sys.stderr, flush=True)))
        finally:
            rank_logs.close()
        if logs is None and outcome.failure is None:
            for log in place.glob("rank-*.txt"):
                log.unlink()
            with contextlib.suppress(OSError):  # not empty: another run's
                place.rmdir()
                place.parent.rmdir()
        return outcome


def _config(request: Request) -> LaunchConfig:
    """torchrun's own reading of its options and of `PET_*`."""
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            args = get_args_parser().parse_args([*request.words(), "luthier"])
            nproc = determine_local_world_size(args.nproc_per_node)
            _, nodes = parse_min_max_nnodes(args.nnodes)
    except (SystemExit, ValueError, RuntimeError) as error:
        last = said.getvalue().strip().splitlines()[-1:] or [str(error)]
        what = last[0].rpartition("error: ")[2]
        raise ConfigError(what, where="the launcher's options and PET_* variables") from None
    alone = nodes == 1 and args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or alone:
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", uuid.uuid4().hex
        args.local_addr = args.local_addr or "localhost"  # a laptop's own name often leads nowhere
    if args.master_port is None:
        args.master_port = 29500
    if args.rdzv_backend != "static":
        args.node_rank = 0  # it means nothing there, and torch would say so
    args.log_dir = os.devnull  # else torch makes a directory that it never uses
    if nproc > 1 and "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(_cores()) // nproc))
    try:
        config: LaunchConfig = config_from_args(args)[0]
        parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=29500)  # else torch says so when it is too late
    except (AssertionError, ValueError) as error:
        raise ConfigError(str(error), where="the launcher's options and PET_* variables") from None
    return config


def _cores() -> Sequence[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _run(config: LaunchConfig, command: Sequence[str], logs: RankLogs, say: Say) -> Outcome:
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    host, port = None, None
    if config.rdzv_backend == "static":
        host, port = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=29500)
    with _rendezvous_errors(config):
        rendezvous = registry.get_rendezvous_handler(parameters)
    spec = WorkerSpec(
        role="rank",
        local_world_size=config.nproc_per_node,
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=rendezvous,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=host,
        master_port=port,
        local_addr=config.local_addr,
        numa_options=config.numa_options,
    )
    agent = _Agent(spec, logs, config, say)
    with agent.signals():
        try:
            with _rendezvous_errors(config):
                result = agent.run()
        finally:
            # Not after a signal: this closes the meeting for good, and another node may be about to take this place.
            if agent.signal is None:
                rendezvous.shutdown()
    if agent.signal is not None and (result is None or result.is_failed()):
        return Outcome(128 + agent.signal, failure=Failure("Interrupted", "interrupted", 128 + agent.signal))
    if result is None or result.is_failed():
        assert agent.failure is not None
        return Outcome(agent.failure.code, failure=agent.failure)
    outcomes = [read_answer(path) for path in logs.answers.values()]
    return Outcome(max(outcome.code for outcome in outcomes), "".join(outcome.text for outcome in outcomes))


class _Agent(LocalElasticAgent):
    """Knows which rank failed first, passes signals on, and does not try again what would fail again."""

    def __init__(self, spec: WorkerSpec, logs: RankLogs, config: LaunchConfig, say: Say) -> None:
        super().__init__(spec, logs, config.start_method, shutdown_timeout=config.shutdown_timeout or 30)
        self.signal: int | None = None
        self.failure: Failure | None = None
        self._logs = logs
        self._say = say
        self._deaths: dict[int, int] = {}

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Within, SIGINT and SIGTERM go to the ranks, which save and stop. Ranks have process groups of their own, so
        that a terminal's Ctrl-C reaches us alone."""
        before = {number: signal.signal(number, self._pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        # torch would end all ranks at the first signal, and takes SIGHUP back from nohup.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        again = self.signal is not None
        self.signal = number
        self._remaining_restarts = 0
        running = [process for process in self._processes().values() if process.poll() is None]
        if not running:
            if self._worker_group.state == WorkerState.SUCCEEDED:
                return  # all is done but waiting for the other nodes
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        for process in running:
            # A second Ctrl-C stops at once; a rank that waits for another inside a collective would not hear it.
            os.killpg(process.pid, signal.SIGKILL if again and number == signal.SIGINT else number)

    def _processes(self) -> dict[int, Any]:
        """The ranks' processes by local rank."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {local: handler.proc for local, handler in handlers.items()}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._deaths = {}
        store, spec = worker_group.store, worker_group.spec
        assert store is not None
        # The store of a static meeting is the same at each start, and the nodes count alike; others have one each time.
        static = spec.rdzv_handler.get_backend() == "static"
        key = f"luthier start {spec.max_restarts - self._remaining_restarts if static else 'now'}"
        if worker_group.group_rank == 0:
            store.set(key, uuid.uuid4().hex)
        self._logs.start = store.get(key).decode()
        return dict(super()._start_workers(worker_group))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Before torch looks: it ends the other ranks at once, which then have failed too.
        for local, process in self._processes().items():
            if process.poll():
                self._deaths.setdefault(local, time.time_ns())
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self.failure = self._first(worker_group, result)
            if self.failure.code in _FINAL:
                self._remaining_restarts = 0
            if self._remaining_restarts:
                restarts = worker_group.spec.max_restarts
                number = restarts - self._remaining_restarts + 1
                self._say(self.failure.report())
                self._say(f"starting again from the last checkpoint (restart {number} of {restarts})")
        return result

    def _first(self, group: WorkerGroup, result: RunResult) -> Failure:
        """The failure that the others followed from."""
        self._logs.close()
        failures = [self._told(group, rank, failure) for rank, failure in result.failures.items()]
        if not failures:
            return Failure("Hanging", "a rank hangs inside the kernel; the machine may need a restart", 1)
        ended = 2**63  # by us, after the first
        return min(failures, key=lambda failure: (failure.peer_gone, failure.at or ended))

    def _told(self, group: WorkerGroup, rank: int, failure: ProcessFailure) -> Failure:
        ranks = group.workers[failure.local_rank].world_size
        log = str(self._logs.logs[failure.local_rank])
        told = read_failure(failure.error_file_data)
        if told is not None:
            if rank == 0:  # shown to all, its log has what it did not print
                self._logs.add(failure.local_rank, told.traceback or f"{told.message}\n")
            return replace(told, rank=rank, ranks=ranks, log=log)
        who = f"rank {rank} of {ranks}"
        died = self._deaths.get(failure.local_rank, 0)
        end = self._logs.end_of(failure.local_rank)
        if failure.exitcode < 0:
            name = failure.signal_name()
            hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
            # NCCL ends a process that waited too long for another.
            gone = name in ("SIGABRT", "SIGTERM")
            message = f"{who} was ended by {name}{hint}; its log is {log}"
            return Failure(name, message, 128 - failure.exitcode, {}, end, died, gone, rank, ranks, log)
        message = f"{who} ended with exit code {failure.exitcode}; its log is {log}"
        return Failure("InternalError", message, failure.exitcode, {}, end, died, False, rank, ranks, log)


@contextmanager
def _quiet() -> Iterator[None]:
    """Within, torch's launcher does not log what we say ourselves, unless LOGLEVEL asks for it."""
    logger = logging.getLogger("torch.distributed.elastic")
    before = logger.propagate
    nothing = logging.NullHandler()
    if "LOGLEVEL" not in os.environ:
        logger.propagate = False
        logger.addHandler(nothing)
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(nothing)


@contextmanager
def _rendezvous_errors(config: LaunchConfig) -> Iterator[None]:
    """Within, nodes that do not find each other are a sentence."""
    where = f"the meeting of {config.min_nodes} nodes at {config.rdzv_endpoint}"
    try:
        yield
    except RendezvousTimeoutError:
        raise ConfigError("not all came in time", where=where, remedy="start the same command on each") from None
    except (RendezvousClosedError, RendezvousGracefulExitError):
        raise ConfigError("another node has ended the run", where=where, remedy="look at its output") from None
    except RendezvousConnectionError:
        raise ConfigError(
            "there is nobody", where=where, remedy="give HOST:PORT of a node on which the same command runs"
        ) from None
    except RendezvousError as error:
        raise ConfigError(str(error) or type(error).__name__, where=where) from None
