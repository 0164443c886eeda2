"""The same over gloo, on the test device over a group with NCCL's rules, and on GPUs over NCCL: `pytest -m nccl`.

Where there is no GPU the last are skipped, and the others show that these tests are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.whole.ranks import cases, meshes, parts, rendezvous, replica_groups, several_kinds
from tests.whole.ranks import tensor_parallel as tensor
from tests.whole.ranks.backends import NCCL, SIM, missing
from tests.whole.ranks.pool import Pool, RankFailed

pytestmark = pytest.mark.nccl
GLOO = ""
ON_GLOO, ON_GPUS = pytest.param(GLOO, id="gloo"), pytest.param(NCCL, id="GPUs")
MODES = [ON_GLOO, pytest.param(SIM, id="test device", marks=pytest.mark.accelerator), ON_GPUS]
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
ALL = (0, 1, 2, 3)
MODE, FOLDER = object(), object()  # in arguments: the mode, a folder
Row = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]  # what ranks do, its arguments, the ranks


def steps(name: str, schedule: str, checkpoint: str, replicas: tuple[int, ...] | None = None, count: int = 2) -> Row:
    """Steps of 8, 7 and 2 samples."""
    return rendezvous.is_the_model, (MODE, name, schedule, checkpoint, replicas), tuple(range(count))


QUICK: dict[str, Row] = {  # by default over gloo, and on the test device
    "skips, zb-v": steps("skip ladder", "zb-v", "except_last"),
    "replicas": steps("tied transformer", "1f1b", "except_last", (2, 1), 3),
    "Ctrl-C": (rendezvous.interrupt, (MODE,), (0, 1, 2)),
}
ROWS: dict[str, Row] = {
    "a mesh with FSDP2": (meshes.schedules_are_the_model, ("dp pp", "fsdp", ["1f1b", "zb-h1"], MODE), ALL),
    **{f"skips, {name}": steps("skip ladder", name, "except_last") for name in SCHEDULES},
    **{f"tied weights, {name}": steps("tied transformer", name, "never") for name in SCHEDULES},
    "statistics, 1f1b": steps("batch norm", "1f1b", "always"),
    "numbers, zb-h1": steps("numbers", "zb-h1", "except_last", count=3),
    "ZeRO-1": (replica_groups.optimizer_is_sharded, (MODE, FOLDER), ALL),
    "a stage of four": (tensor.plan_is_the_model, ("blocks", "a stage of four", MODE), ALL),
    "two stages of two": (tensor.plan_is_the_model, ("joined", "two stages of two", MODE), ALL),
    "two replicas of two": (tensor.plan_is_the_model, ("words", "two replicas of two", MODE), ALL),
    "a mesh with DDP": (meshes.schedules_are_the_model, ("dp pp", "ddp", ["gpipe", "zb-v"], MODE), ALL),
    "a mesh with tensor parallelism": (
        meshes.schedules_are_the_model, ("pp tp", "tp", ["1f1b", "interleaved"], MODE), ALL,
    ),
    "an error in one row of a mesh": (meshes.fail_in_one_row, ("ddp", MODE), ALL),
    "no memory on one rank": (rendezvous.tell_of_faults, (MODE,), (0, 1, 2)),
    "an error in each action": (rendezvous.fail_in_each_action, (MODE,), (0, 1, 2)),
    "a wrong shape on one rank": (cases.differ, (), ALL),
    **QUICK,
}  # fmt: skip
Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """`run(mode, function, *arguments, ranks=...)`, on ranks that are kept until something fails there."""
    pools: dict[str, Pool] = {}

    def run_on(mode: str, function: Callable[..., Any], *args: Any, ranks: tuple[int, ...] = ALL) -> list[Any]:
        if reason := missing(mode):
            pytest.skip(reason)
        if mode not in pools:
            pools[mode] = Pool(mode=mode)
        try:
            return pools[mode].run(function, *args, ranks=ranks)
        except RankFailed:
            pools.pop(mode).close()
            raise

    yield run_on
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ROWS]
)
def test_ranks(run: Run, tmp_path: Path, name: str, mode: str) -> None:
    function, given, ranks = ROWS[name]
    run(
        mode,
        function,
        *({id(MODE): mode, id(FOLDER): tmp_path / "saved"}.get(id(one), one) for one in given),
        ranks=ranks,
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["plain", "replicas", "tensor parallel", "ddp", "fsdp"])
def test_several_kinds_of_calls(run: Run, form: str, mode: str) -> None:
    for seed in range(5 if form in ("plain", "replicas") else 2):
        case = several_kinds.drawn(seed, 4, form)
        found = run(mode, several_kinds.run, case)
        assert not any(found), f"{case}: {found}"


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_another_number_of_ranks_goes_on(run: Run, tmp_path: Path, mode: str) -> None:
    wanted, losses = parts.put_together(run(mode, parts.saved, tmp_path / "saved"))
    for ranks in ((0, 1), (0, 1, 2)):
        state, found = parts.put_together(run(mode, parts.gone_on, tmp_path / "saved", False, ranks=ranks))
        assert found == pytest.approx(losses, rel=1e-9)
        assert state.keys() == wanted.keys()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [ON_GLOO, ON_GPUS])  # on the test device the host waits where on a GPU a stream does
@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_lost_rank_is_named(end: str, mode: str) -> None:
    """Ranks of their own, for they end: within seconds, and before the watchdog of NCCL ends the process."""
    if reason := missing(mode):
        pytest.skip(reason)
    ranks = Pool(3, mode=mode)
    try:
        ranks.start(rendezvous.lose_one, mode, end, ranks=(0, 1, 2))
        for rank in (0, 2):
            with pytest.raises((RankFailed, EOFError), match="rank 1 " + ("is gone" if end == "kill" else "did not")):
                ranks.results((rank,), 60)
    finally:
        ranks.close()
