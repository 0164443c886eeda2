"""Python's thresholds of garbage collection while models are captured, and afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.pipe.interpreter.garbage_collection import OBJECTS, rare_collections


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_a_block_in_a_block() -> None:
    with rare_collections():
        with rare_collections():
            assert gc.get_threshold()[0] == OBJECTS
        assert gc.get_threshold()[0] == OBJECTS
    assert gc.get_threshold()[0] == 700


def test_blocks_of_two_threads_overlap() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with rare_collections():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with rare_collections():
        thread.start()
        entered.wait()
    assert gc.get_threshold()[0] == OBJECTS
    leave.set()
    thread.join()
    assert gc.get_threshold()[0] == 700


def test_what_the_user_sets_stays() -> None:
    gc.set_threshold(0)
    with rare_collections():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 0
    gc.set_threshold(50_000)
    with rare_collections():
        assert gc.get_threshold()[0] == 50_000
        gc.set_threshold(60_000)
    assert gc.get_threshold()[0] == 60_000


def test_a_capture() -> None:
    seen = list[int]()

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    def look(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
        seen.append(gc.get_threshold()[0])
        return gm

    pipe = fxpipe.compile(Looks(), devices=1, chunks=2, transforms=(look,))
    pipe(torch.zeros(4, 2))
    pipe.close()
    assert seen == [OBJECTS]
    assert gc.get_threshold()[0] == 700
