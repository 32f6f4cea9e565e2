"""What the environment makes of a process, cluster by cluster."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from luthier.errors import ConfigError
from luthier.launch import Place, Request, join, place, request
from luthier.launch.place import refuse_half

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_NODELIST": "gpu[001-008]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}
SBATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_NODELIST": "n1"}
TRAINJOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}
PYTORCHJOB = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
IN_STEP_PORT = 10_000 + (123456 + 2 * 101) % 20_000

PLACES = [
    ("a process of its own", {}, None),
    ("torchrun", TORCHRUN, Place(5, 8, 1, ("node0", 29500))),
    ("ranks of this machine", {**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, Place(5, 8, 1, ("node0", 29500), local_ranks=4)),
    (
        "torchrun, restarted",
        {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"},
        Place(5, 8, 1, ("node0", 29500), 2, start="2"),
    ),
    ("srun", SRUN, Place(5, 8, 1, ("gpu007", IN_STEP_PORT))),
    ("torchrun inside srun", SRUN | TORCHRUN, Place(5, 8, 1, ("node0", 29500))),
    ("our launcher under Kubeflow", TRAINJOB | TORCHRUN, Place(5, 8, 1, ("node0", 29500))),
    ("srun with a master of its own", {**SRUN, "MASTER_ADDR": "h", "MASTER_PORT": "9"}, Place(5, 8, 1, ("h", 9))),
    ("requeued by Slurm", {**SRUN, "SLURM_RESTART_COUNT": "1"}, Place(5, 8, 1, ("gpu007", IN_STEP_PORT), 1)),
    ("a batch script without srun", SBATCH, None),
    ("the same in a later rank", {**SBATCH, "SLURM_PROCID": "3"}, Place(3, 8, 0, ("n1", 10_007))),
    ("an interactive shell", {**SBATCH, "SLURM_STEP_ID": "4294967290"}, None),
    ("srun of one task", {**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, None),
    (
        "only srun's address",
        {**SBATCH, "SLURM_NODELIST": "", "SLURM_LAUNCH_NODE_IPADDR": "1.2.3.4"},
        ("1.2.3.4", 10_007),
    ),
    ("Kubeflow", TRAINJOB, None),
    ("Kubeflow's older operator", PYTORCHJOB, Place(1, 2, 0, ("job-master-0", 23456))),
    ("the same with PET_*", PYTORCHJOB | TRAINJOB, None),
]


@pytest.mark.parametrize(("environment", "expected"), [row[1:] for row in PLACES], ids=[row[0] for row in PLACES])
def test_place(environment: dict[str, str], expected: Any) -> None:
    found = place(environment)
    if isinstance(expected, tuple):
        assert found is not None
        assert found.master == expected
    else:
        assert found == expected
    if found is not None:
        assert place(found.variables()) == Place(found.rank, found.ranks, found.local_rank, found.master)


def test_a_place_that_makes_no_sense_is_named() -> None:
    with pytest.raises(ConfigError, match=r'^environment variable RANK: "first" is not a whole number$'):
        place({**TORCHRUN, "RANK": "first"})
    nowhere = {name: value for name, value in SRUN.items() if not name.endswith(("NODELIST", "IPADDR"))}
    with pytest.raises(ConfigError, match="no variable of Slurm names a node; set MASTER_ADDR"):
        place(nowhere)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({**TORCHRUN, "RANK": "8"}, "RANK: it is 8, and WORLD_SIZE says 8; ranks are numbered from 0"),
        ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "0"}, "RANK: it is 0, and WORLD_SIZE says 0; ranks are"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK: it is 1, and LOCAL_WORLD_SIZE says 1; ranks are"),
        ({**SRUN, "SLURM_PROCID": "8"}, "SLURM_PROCID: it is 8, and SLURM_STEP_NUM_TASKS says 8; ranks are"),
        ({**SBATCH, "SLURM_PROCID": "9"}, "SLURM_PROCID: it is 9, and SLURM_NTASKS says 8; ranks are"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT: 99999 is no port where ranks could meet; give one from 1"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT: 0 is no port where ranks could meet; give one from 1"),
        ({**SRUN, "MASTER_PORT": "70000"}, "MASTER_PORT: 70000 is no port where ranks could meet; give one from 1"),
    ],
)
def test_numbers_that_no_rank_can_have_are_named(environment: dict[str, str], sentence: str) -> None:
    """All the ranks of such a run would wait for each other."""
    with pytest.raises(ConfigError) as caught:
        place(environment)
    assert str(caught.value).startswith(f"environment variable {sentence}")


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        (["MASTER_PORT"], "WORLD_SIZE: it is 8, and of what torchrun sets beside it MASTER_PORT is missing; set all"),
        (["RANK", "MASTER_ADDR"], "WORLD_SIZE: it is 8, and of what torchrun sets beside it RANK and MASTER_ADDR are"),
        (["WORLD_SIZE"], "RANK: it is 5, and of what torchrun sets beside it WORLD_SIZE is missing; set all"),
    ],
)
def test_half_a_place_is_not_taken_for_none(monkeypatch: pytest.MonkeyPatch, missing: list[str], sentence: str) -> None:
    """Each rank would train alone, on all rows and into the same directory."""
    half = {name: value for name, value in TORCHRUN.items() if name not in missing}
    assert place(half) is None
    with pytest.raises(ConfigError) as caught:
        refuse_half(half)
    assert str(caught.value).startswith(f"environment variable {sentence}")
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in half.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="set all four for each rank"), join(torch.device("cpu")):
        pass
    assert place(SRUN | half) == place({**SRUN, **{k: v for k, v in half.items() if k.startswith("MASTER")}})
    assert request(half, **FOUR) == Request(nproc="4")
    refuse_half(TRAINJOB | half)  # for the launcher
    refuse_half({**half, "RANK": "", "WORLD_SIZE": "1"})


FOUR = {"nproc": "4"}
REQUESTS = [
    ("nothing asked", {}, {}, None),
    ("--nproc", {}, FOUR, Request(nproc="4")),
    ("a rank is not asked again", {**TORCHRUN, "LUTHIER_START": "7f"}, FOUR, None),
    ("torchrun's rank", TORCHRUN, {}, None),
    ("Kubeflow", TRAINJOB, {}, Request()),
    ("one of Kubeflow's ranks", TRAINJOB | TORCHRUN, {}, None),
    ("options go before PET_*", TRAINJOB, {"max_restarts": 3}, Request(max_restarts=3)),
    ("Kubeflow's older operator", PYTORCHJOB | TRAINJOB, {}, Request()),
    ("srun", SRUN, {}, None),
    ("a launcher on each node by srun", SRUN, FOUR, Request(nproc="4")),
    ("nodes", {}, {"nnodes": "2:4", "rdzv_endpoint": "h:1"}, Request(nnodes="2:4", rdzv_endpoint="h:1")),
    ("one node meets nobody", {}, {"nnodes": "1"}, Request(nnodes="1")),
]


@pytest.mark.parametrize(
    ("environment", "options", "expected"), [row[1:] for row in REQUESTS], ids=[row[0] for row in REQUESTS]
)
def test_request(environment: dict[str, str], options: dict[str, Any], expected: Request | None) -> None:
    assert request(environment, **options) == expected


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"nproc": "many"}, '--nproc: "many" is not a number of processes; give 1, 2, ... or auto'),
        ({"nproc": "0"}, '--nproc: "0" is not a number of processes; give 1, 2, ... or auto'),
        ({"nnodes": "4:2"}, '--nnodes: "4:2" is not a number of nodes; give N or MIN:MAX'),
        ({"nnodes": "2"}, "--rdzv-endpoint: is missing, and several nodes must meet somewhere; "),
    ],
)
def test_requests_that_make_no_sense(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        request({}, **options)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("option", [FOUR, {"nnodes": "2"}, {"rdzv_endpoint": "h:1"}, {"max_restarts": 1}])
def test_a_rank_that_others_started_starts_none(option: dict[str, Any]) -> None:
    """Variables that an earlier command left behind would else make one process of four."""
    with pytest.raises(
        ConfigError, match="it asks for ranks to be started, and RANK and WORLD_SIZE make this rank 0 of 1"
    ):
        request({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, **option)


def test_torchrun_reads_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options and PET_* meet in torch's own reading of them."""
    from luthier.launch.agent import _config

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, value in TRAINJOB.items():
        monkeypatch.setenv(name, value)
    config = _config(Request(max_restarts=2))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (2, 2, 4, 2)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("static", "job-node-0-0.job:29500")
    assert config.rdzv_configs["rank"] == 1

    config = _config(Request(nproc="2", nnodes="1:3", rdzv_endpoint="host:1234"))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 3, 2)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "host:1234")

    monkeypatch.setenv("PET_MAX_RESTARTS", "some")
    with pytest.raises(ConfigError, match=r"PET_\* variables: argument --max-restarts.*'some'$"):
        _config(Request())


@pytest.mark.parametrize("endpoint", ["h:99999", "h:p", ":29500"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    from luthier.launch.agent import _config

    with pytest.raises(ConfigError, match="the launcher's options and PET_"):
        _config(Request(nproc="1", rdzv_endpoint=endpoint))
