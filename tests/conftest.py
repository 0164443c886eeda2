"""Fixtures for all tests: goldens, and one thread per worker."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: OpenMP spins, busy workers become ten times slower

import pytest
import torch

from tests.helpers.garbage import collect_once, collect_seldom

GOLDEN = Path(__file__).parent / "golden"
# By a part of the path, the first that fits: tests that share what takes long to make (compiled code, a pool of ranks)
# share a process. Those of None share nothing.
SEARCHES = ("planning/operators/", "/search.py", "/searched.py", "/test_searched.py", "/test_strategy_search.py")
GROUPS = {"/test_product.py": None} | dict.fromkeys(SEARCHES, "compiled by numba") | {"whole/ranks/": "over ranks"}
GROUPS |= {"tests/accelerator/": "on the test device"}
# Tests of these files with the same parameters, of one model mostly, follow each other in one process, which captures
# the model once for all.
OF_MODELS = (
    "test_transforms.py",
    "test_compose_trace.py",
    *(f"whole/test_{name}.py" for name in ("backward_code", "deadlock", "steps", "transparency")),
)
FILES = 40  # between two collections of all garbage
files_done = count(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the code prints now")
    parser.addoption("--part", default="1/1", help="1/3, 2/3 or 3/3: a third of the tests that would run")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    gc.disable()  # until all tests are collected: nearly all that is made before stays
    # PyTorch writes what it traces for whoever listens, as pytest does to each logger that passes nothing on.
    logging.getLogger("torch.__trace").propagate = True
    with suppress(ImportError):  # what needs a GPU does without
        steady_examples()


def steady_examples() -> None:
    """Each run of hypothesis tries what the one before has tried, however busy the machine: a fault that is found is
    one of what has changed."""
    from hypothesis import HealthCheck, settings

    busy = [HealthCheck.too_slow]
    settings.register_profile("steady", derandomize=True, database=None, deadline=None, suppress_health_check=busy)
    settings.load_profile("steady")


def pytest_collection_finish(session: pytest.Session) -> None:
    collect_seldom()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test draws the same numbers wherever and after whatever it runs, so its fixtures do."""
    torch.manual_seed(crc32(item.nodeid.encode()))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Between two files, and not often: it takes as long as a test does."""
    if nextitem is not None and nextitem.path != item.path and next(files_done) % FILES == 0:
        collect_once()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises, also where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # all that took it have put it back
    signal.signal(signal.SIGINT, before)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Groups go to processes whole, the largest first; other tests one by one. pytest-xdist 3.8 reads its own marks of
    groups from a name of tests that pytest 9.2 no longer has: with these two, `loadgroup` alone groups nothing."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path, _, test = nodeid.partition("::")
            if path.endswith(OF_MODELS):
                return test.partition("[")[2] or nodeid
            return next((group for part, group in GROUPS.items() if part in path), None) or nodeid

    return ByGroup(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow and long tests are there only when asked for by `-m`, as those of NCCL are all; `--part` leaves a part of
    all. Tests that need a GPU say so where there is none."""
    asked = config.getoption("-m")
    marks = {item: next(filter(item.get_closest_marker, ("long", "slow")), "") for item in items}
    if "nccl" in asked:
        marks |= {item: "" for item in items if item.get_closest_marker("nccl")}
    part, parts = map(int, config.getoption("--part").split("/"))
    in_part = {item: crc32(item.nodeid.encode()) % parts == part % parts for item in items}
    wanted = {item: mark in asked and in_part[item] for item, mark in marks.items()}
    config.hook.pytest_deselected(items=[item for item in items if not wanted[item]])
    items[:] = [item for item in items if wanted[item]]
    for item in items:
        if "cuda" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("unet/stage0.py", text)`: the text equals the committed file; `--update-golden` writes it."""
    update = request.config.getoption("--update-golden")

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif not path.exists():
            pytest.fail(f"there is no golden {name}; look at the text, then run pytest --update-golden\n\n{text}")
        assert text == path.read_text(), f"differs from the golden {name}; accept with pytest --update-golden"

    return compare
