"""Calls and steps with chunks=1 over ranks, whose inputs have no common batch size or are taken apart by forward."""

from __future__ import annotations

import copy
from typing import Any

import torch

import fxpipe
from tests.whole.test_uncut import BODIES, Net, double, loss_of


def as_the_model(group: Any, name: str) -> None:
    body, make = next((body, make) for body, make in BODIES.items() if body.__name__ == name)
    torch.manual_seed(0)
    plain = Net(body).double()
    pipe = fxpipe.compile(copy.deepcopy(plain), 2, chunks=1, schedule="1f1b", group=group, timeout=60)
    of = dict(plain.named_parameters())
    for size in (4, 5, 3):
        torch.manual_seed(size)
        args = double(make(size))
        torch.testing.assert_close(pipe.forward_only(*args), plain(*args).detach())
        plain.zero_grad()
        pipe.zero_grad()
        expected = loss_of(plain(*args))
        expected.backward()
        torch.testing.assert_close(pipe.step(*args, loss_fn=loss_of), expected.detach())
        for path, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, of[path].grad)
    pipe.close()
