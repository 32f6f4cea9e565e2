"""What the environment says: which rank this process is, and whether it is to start others. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from luthier.errors import ConfigError

Environment = Mapping[str, str]

ATTEMPT = "LUTHIER_ATTEMPT"
"""Set by our launcher: how many times these ranks were started before."""
START = "LUTHIER_START"
"""Set by our launcher: a name of this start, the same on all nodes."""

# Slurm counts its own steps (batch script, interactive shell) down from here; srun's count up from 0.
_SLURM_SPECIAL_STEP = 0xFFFF_FFF0
# Only srun sets these. A batch script without srun has SLURM_PROCID=0 and SLURM_NTASKS too, and is alone.
_SRUN = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_HOST")
# Below the ports that Linux hands out by itself (32768 and up), above those of the usual services.
_FIRST_PORT, _PORTS = 10_000, 20_000
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PET = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT")


@dataclass(frozen=True, slots=True)
class Place:
    """Which process this one is.

    Attributes:
        rank: among all, from 0.
        ranks: how many there are.
        local_rank: among those of this machine, from 0: the device that is this rank's.
        master: host and port at which rank 0 keeps the store where all meet.
        attempt: how many times the ranks were started before, after a failure or with other nodes.
        local_ranks: how many this machine has, where whoever started them says so.
        start: what tells the messages of these ranks from those of earlier ones in a store that outlives them.
    """

    rank: int
    ranks: int
    local_rank: int
    master: tuple[str, int]
    attempt: int = 0
    local_ranks: int | None = None
    start: str = "0"

    def variables(self) -> dict[str, str]:
        """The same as torchrun says it, for what reads only that."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.master[0],
            "MASTER_PORT": str(self.master[1]),
        }


def place(environment: Environment) -> Place | None:
    """Which rank the environment makes of this process; None for a process of its own.

    torchrun and our own launcher come first, since they may themselves run inside srun.

    Raises:
        ConfigError: a variable that says so is not what it should be.
    """
    return _torchrun(environment) or _slurm(environment)


def refuse_half(environment: Environment) -> None:
    """Refuse variables of torchrun that speak of several ranks, and do not say where they meet or which this one is:
    each would train alone, on all rows and into the same directory. For a process that `place` makes no rank of.

    Raises:
        ConfigError: with what is missing.
    """
    if asked_by_kubeflow(environment):
        return
    missing = [name for name in _TORCHRUN if not environment.get(name)]
    others = environment.get("WORLD_SIZE") and _number(environment, "WORLD_SIZE") > 1
    for name, said in (("WORLD_SIZE", others), ("RANK", environment.get("RANK") and "WORLD_SIZE" in missing)):
        if said:
            raise ConfigError(
                f"it is {environment[name]}, and of what torchrun sets beside it {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing",
                where=f"environment variable {name}",
                remedy="set all four for each rank, or unset it for a process of its own",
            )


def _torchrun(environment: Environment) -> Place | None:
    # Kubeflow's older operator gives RANK and WORLD_SIZE of machines next to PET_*: those are for the launcher.
    if not all(environment.get(name) for name in _TORCHRUN):
        return None
    if "LOCAL_RANK" not in environment and asked_by_kubeflow(environment):
        return None
    ranks, local_ranks = _number(environment, "WORLD_SIZE"), _number(environment, "LOCAL_WORLD_SIZE", 0) or None
    return Place(
        rank=_below(environment, "RANK", ranks, "WORLD_SIZE"),
        ranks=ranks,
        local_rank=_below(environment, "LOCAL_RANK", local_ranks, "LOCAL_WORLD_SIZE", 0),
        master=(environment["MASTER_ADDR"], _port(environment)),
        attempt=max(
            _number(environment, ATTEMPT, 0),
            _number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
            _number(environment, "SLURM_RESTART_COUNT", 0),
        ),
        local_ranks=local_ranks,
        start=environment.get(START) or environment.get("TORCHELASTIC_RESTART_COUNT") or "0",
    )


def _slurm(environment: Environment) -> Place | None:
    if not environment.get("SLURM_PROCID") or not environment.get("SLURM_NTASKS", environment.get(_SRUN[0])):
        return None
    rank = _number(environment, "SLURM_PROCID")
    step = _number(environment, "SLURM_STEP_ID", _number(environment, "SLURM_STEPID", -1))
    if step >= _SLURM_SPECIAL_STEP:
        return None
    if step < 0 and rank == 0 and not any(name in environment for name in _SRUN):
        return None
    ranks = _number(environment, "SLURM_STEP_NUM_TASKS", _number(environment, "SLURM_NTASKS", 1))
    if ranks < 2:
        return None
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    nodes = nodes or environment.get("SLURM_JOB_NODELIST", "")
    # srun's own machine comes second: it may be a login node, and rank 0 runs on the first of the list.
    host = environment.get("MASTER_ADDR") or first_node(nodes) or environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if not host:
        raise ConfigError("no variable of Slurm names a node", where="SLURM_NODELIST", remedy="set MASTER_ADDR")
    job = _number(environment, "SLURM_JOB_ID", _number(environment, "SLURM_JOBID", 0))
    port = _FIRST_PORT + (job + 101 * max(step, 0)) % _PORTS  # two steps of a job may run at once
    counted = "SLURM_STEP_NUM_TASKS" if environment.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    return Place(
        rank=_below(environment, "SLURM_PROCID", ranks, counted),
        ranks=ranks,
        local_rank=_number(environment, "SLURM_LOCALID", 0),
        master=(host, _port(environment, port)),
        attempt=_number(environment, "SLURM_RESTART_COUNT", 0),
    )


def first_node(nodes: str) -> str:
    """The first name of a Slurm node list.

    >>> first_node("gpu[007-012,020],login1"), first_node("rack2-n[3,5]a[1-4]"), first_node("alone")
    ('gpu007', 'rack2-n3a1', 'alone')
    """
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    first = found.group() if found else ""
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def _number(environment: Environment, name: str, default: int | None = None) -> int:
    text = environment.get(name) or None
    if text is None and default is not None:
        return default
    if text is None or not text.strip().isdecimal():
        raise ConfigError(f'"{text or ""}" is not a whole number', where=f"environment variable {name}")
    return int(text)


def _below(environment: Environment, name: str, count: int | None, counted: str, default: int | None = None) -> int:
    """A rank's number, of so many as another variable says: all would wait an hour for one that none of them is."""
    number = _number(environment, name, default)
    if count is not None and number >= count:
        what = f"it is {number}, and {counted} says {count}; ranks are numbered from 0 up to one less"
        raise ConfigError(what, where=f"environment variable {name}")
    return number


def _port(environment: Environment, default: int | None = None) -> int:
    number = _number(environment, "MASTER_PORT", default)
    if not 1 <= number <= 65535:
        what = f"{number} is no port where ranks could meet"
        raise ConfigError(what, where="environment variable MASTER_PORT", remedy="give one from 1 to 65535")
    return number


@dataclass(frozen=True, slots=True)
class Request:
    """The processes that this one is to start; what is None is left to Kubeflow's `PET_*` and torchrun's defaults.

    Attributes:
        nproc: how many on this machine: a number, or auto, gpu, cpu (one for each).
        nnodes: machines: "4", or "2:4" for as many as come.
        rdzv_endpoint: HOST:PORT where the machines meet; one of them.
        max_restarts: how many failures to start again after.
    """

    nproc: str | None = None
    nnodes: str | None = None
    rdzv_endpoint: str | None = None
    max_restarts: int | None = None

    def words(self) -> list[str]:
        """The same as torchrun's command line has it."""
        words = []
        if self.nproc is not None:
            words += ["--nproc-per-node", self.nproc]
        if self.nnodes is not None:
            words += ["--nnodes", self.nnodes]
        if self.rdzv_endpoint is not None:
            words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", self.rdzv_endpoint]
        if self.max_restarts is not None:
            words += ["--max-restarts", str(self.max_restarts)]
        return words


def request(
    environment: Environment,
    *,
    nproc: str | None = None,
    nnodes: str | None = None,
    rdzv_endpoint: str | None = None,
    max_restarts: int | None = None,
) -> Request | None:
    """The processes to start, or None where this one is to do the work: it is a rank already, or nobody asked.

    Args:
        environment: of this process.
        nproc: the option of that name, None where it was not given; so for the others.

    Raises:
        ConfigError: an option says nothing that could be started, or is given to a rank that somebody else has started.
    """
    options = {
        "--nproc": nproc,
        "--nnodes": nnodes,
        "--rdzv-endpoint": rdzv_endpoint,
        "--max-restarts": max_restarts,
    }
    asked = {name: value for name, value in options.items() if value is not None}
    if (here := _torchrun(environment)) is not None:
        if asked and not environment.get(START):  # our own ranks run the command that started them
            name, value = next(iter(asked.items()))
            raise ConfigError(
                f"it asks for ranks to be started, and RANK and WORLD_SIZE make this rank {here.rank} of {here.ranks}",
                where=f"{name} {value}",
                remedy="leave it out, or unset RANK and WORLD_SIZE",
            )
        return None
    if not asked:
        # Asked for by name, a launcher starts inside srun too: one task a node is the usual way.
        return Request() if _slurm(environment) is None and asked_by_kubeflow(environment) else None
    if nproc is not None and nproc not in ("auto", "gpu", "cpu") and (not nproc.isdecimal() or int(nproc) < 1):
        raise ConfigError(f'"{nproc}" is not a number of processes', where="--nproc", remedy="give 1, 2, ... or auto")
    if nnodes is not None:
        few, _, many = nnodes.partition(":")
        counts = [few, many or few]
        if not all(count.isdecimal() for count in counts) or not 1 <= int(counts[0]) <= int(counts[1]):
            raise ConfigError(f'"{nnodes}" is not a number of nodes', where="--nnodes", remedy="give N or MIN:MAX")
        meeting = rdzv_endpoint or environment.get("PET_RDZV_ENDPOINT") or environment.get("PET_MASTER_ADDR")
        if int(counts[1]) > 1 and not meeting:
            raise ConfigError(
                "is missing, and several nodes must meet somewhere",
                where="--rdzv-endpoint",
                remedy="give one of them as HOST:PORT, the same on all",
            )
    return Request(nproc=nproc, nnodes=nnodes, rdzv_endpoint=rdzv_endpoint, max_restarts=max_restarts)


def asked_by_kubeflow(environment: Environment) -> bool:
    """Whether variables of torchrun's own launcher are set, as Kubeflow Trainer does."""
    return any(environment.get(name) for name in _PET)
