"""Tests that run in a process of their own, which has the test device: torch keeps an accelerator for good.

@on_device
@pytest.mark.parametrize("name", NAMES)
def test_something(name): ...
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, wraps
from multiprocessing import get_context
from typing import Any

from tests.helpers.garbage import collect_seldom

from .simulated_device import load

PATIENCE = 550  # seconds that one test may take, the first with the compiler


@cache
def child() -> ProcessPoolExecutor:
    """The process; all tests of this one share it."""
    return ProcessPoolExecutor(1, get_context("spawn"), collect_seldom)


def on_device(test: Callable[..., None]) -> Callable[..., None]:
    """The test, run in the child process: a function of a module, whose arguments can be pickled."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        failed = child().submit(work, test.__module__, test.__name__, args, kwargs).result(PATIENCE)
        assert failed is None, failed

    return run


def work(module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Run the test here. Returns its traceback if it fails."""
    import torch

    try:
        torch.set_num_threads(1)
        load()
        getattr(importlib.import_module(module), name).__wrapped__(*args, **kwargs)
    except BaseException:
        return traceback.format_exc()
    return None
