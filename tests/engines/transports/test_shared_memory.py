"""Memory that two processes share: what one end has written the other one reads, in the same places step after step."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from fxpipe.engines.transports import shared_memory as module
from fxpipe.engines.transports.message_format import nbytes, read, seal
from fxpipe.engines.transports.same_machine import machine
from fxpipe.engines.transports.shared_memory import BLOCK, LETTERS, SIZE, SharedBuffer

F32 = torch.float32, (3, 5)
pytestmark = pytest.mark.skipif(machine() is None, reason="this machine lets processes share no memory")


@pytest.fixture
def ends() -> Iterator[tuple[SharedBuffer, SharedBuffer]]:
    """Of the sender and of the receiver, each with a mapping of its own."""
    file = os.memfd_create("test")
    os.truncate(file, SIZE)
    yield SharedBuffer(file), SharedBuffer(file)
    os.close(file)


def test_a_value_is_there_once_it_is_stamped(ends: tuple[SharedBuffer, SharedBuffer]) -> None:
    out, into = ends
    for step in (1, 2):
        out.begin(step), into.begin(step)
        for number, size in enumerate([F32, (torch.bool, ()), (torch.complex128, (7,)), F32]):
            sent, came = out.slot(size), into.slot(size)
            assert sent is not None
            assert came is not None
            assert not came.there()
            value = torch.full(size[1], step * number % 3, dtype=size[0])
            seal(value, False, size, sent.tensor(size))
            assert not came.there()
            sent.stamp()
            assert came.there()
            assert torch.equal(read(came.tensor(size), size, None), value)


def test_values_do_not_overlap_and_begin_again(ends: tuple[SharedBuffer, SharedBuffer]) -> None:
    out, _ = ends
    for step in (1, 2):
        out.begin(step)
        end = module.VALUE
        for size in (F32, (torch.float64, (1000,)), (torch.uint8, (1,))):
            slot = out.slot(size)
            assert slot is not None
            assert slot.at >= end
            assert slot.at % 64 == 0
            end = slot.at + nbytes(size)


def test_where_there_is_no_place_both_ends_know(ends: tuple[SharedBuffer, SharedBuffer]) -> None:
    large, small = (torch.uint8, (3 * module.ROOM // 4,)), (torch.uint8, (64,))
    for end in ends:
        end.begin(1)
        found = [end.slot(size) is not None for size in (large, large, small)]
        assert found == [True, False, True]
        assert [end.slot(small) is not None for _ in range(module.VALUES)].count(True) == module.VALUES - 2


def test_letters_arrive_in_order_and_wait_for_a_place(ends: tuple[SharedBuffer, SharedBuffer]) -> None:
    out, into = ends
    for number in range(1, 3 * LETTERS):
        assert not into.has(number)
        out.write(str(number).encode().ljust(BLOCK, b"\0"))
        assert into.has(number)
        assert not into.has(number + 1)
        assert int(into.read(number).rstrip(b"\0")) == number
    for _ in range(LETTERS):
        assert out.may_write()
        out.write(b"unheard")
    assert not out.may_write()
    into.read(3 * LETTERS)
    assert out.may_write()


def test_an_end_is_seen(ends: tuple[SharedBuffer, SharedBuffer]) -> None:
    out, into = ends
    assert not into.closed()
    out.close()
    assert into.closed()
