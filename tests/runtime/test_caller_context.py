"""The modes of one thread, entered on another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from fxpipe.runtime.caller_context import current_context

MODES = [
    nullcontext(),
    torch.no_grad(),
    torch.inference_mode(),
    torch.autocast("cpu", torch.bfloat16),
    torch.autocast("cpu", torch.float16, cache_enabled=False),
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: type(mode).__name__)
def test_another_thread_enters_what_this_one_is_in(mode: AbstractContextManager[None]) -> None:
    def elsewhere() -> tuple[bool, bool]:
        with context.enter():
            inside = current_context() == context
        return inside, current_context().plain

    with mode, ThreadPoolExecutor(1) as fresh:
        context = current_context()
        assert fresh.submit(elsewhere).result() == (True, True)


def test_autocast_alone_never_caches_and_undoes_an_outer_one() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        inside = current_context()
    outside = current_context()
    with inside.enter_autocast():
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_cache_enabled()
    with torch.autocast("cpu", torch.bfloat16), outside.enter_autocast():
        assert not torch.is_autocast_enabled("cpu")
