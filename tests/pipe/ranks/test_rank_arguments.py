"""What tells at a glance whether the arguments of a call look as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxpipe.capture import NO_TARGET
from fxpipe.pipe.ranks.rank_arguments import Given, glance

X = torch.zeros(4, 2)


def call(*args: Any, target: Any = NO_TARGET, **kwargs: Any) -> Given:
    return args, kwargs, target


def test_other_values_look_the_same() -> None:
    assert glance(call(X, 2, mask=None, target=X)) == glance(call(X + 1, 2, mask=None, target=X))


@pytest.mark.parametrize(
    "other",
    [
        call(X[:3], flag=True), call(X.double(), flag=True), call(X.T.contiguous().T, flag=True), call(X, X, flag=True),
        call(X.clone().requires_grad_(), flag=True), call(X, flag=1), call(X, other=True), call(X, flag=True, target=X),
    ],
)  # fmt: skip
def test_other_looks(other: Given) -> None:
    assert glance(call(X, flag=True)) != glance(other)


def test_what_takes_more_than_a_glance() -> None:
    assert glance(call([X])) is None
    assert glance(call(X.to_sparse())) is None
