"""Draws repeat, differ from each other, and leave the default generator alone."""

from __future__ import annotations

from threading import Thread

import torch

from fxpipe.runtime import Draws
from fxpipe.runtime.random import mix, new_seed

CPU = torch.device("cpu")


def test_a_draw_is_a_fresh_generator_with_the_mixed_seed() -> None:
    with Draws(7, 2, CPU)(3):
        inside = torch.rand(4)
    assert torch.equal(inside, torch.rand(4, generator=torch.Generator().manual_seed(mix(7, 2, 3))))


def test_the_default_generator_goes_on_as_if_nothing_had_been_drawn() -> None:
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    with Draws(7, 2, CPU)(3):
        torch.rand(100)
    assert torch.equal(torch.rand(2), expected)


def test_threads_do_not_disturb_each_other() -> None:
    drawn: dict[int, torch.Tensor] = {}

    def work(i: int) -> None:
        for _ in range(50):
            with Draws(1, i, CPU)(0):
                drawn[i] = torch.rand(1000)
            assert torch.equal(drawn[i], torch.rand(1000, generator=torch.Generator().manual_seed(mix(1, i, 0))))

    threads = [Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({tuple(x.tolist()) for x in drawn.values()}) == 4


def test_mix_is_the_same_for_ever() -> None:
    assert [mix(0, 0, 0), mix(1, 2, 3)] == [mix(0, 0, 0), mix(1, 2, 3)]
    assert mix(0, 1, 0) != mix(0, 0, 1) != mix(1, 0, 0)
    assert all(0 <= mix(seed, 5, 6) < 1 << 63 for seed in (-1, 0, 1 << 62))


def test_a_run_is_reproducible_by_manual_seed() -> None:
    torch.manual_seed(3)
    first = new_seed()
    torch.manual_seed(3)
    assert new_seed() == first != new_seed()
