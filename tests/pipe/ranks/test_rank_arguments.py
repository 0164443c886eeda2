"""What tells at a glance whether the arguments of a call look as before, and whether ranks agree on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxpipe.capture import NO_TARGET
from fxpipe.errors import RankError
from fxpipe.pipe.ranks.rank_arguments import CallArguments, check_same, glance

X = torch.zeros(4, 2)


def call(*args: Any, target: Any = NO_TARGET, **kwargs: Any) -> CallArguments:
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
def test_other_looks(other: CallArguments) -> None:
    assert glance(call(X, flag=True)) != glance(other)


def test_what_takes_more_than_a_glance() -> None:
    assert glance(call([X])) is None
    assert glance(call(X.to_sparse())) is None


def test_a_gradient_that_only_some_ranks_ask_for() -> None:
    with_gradient, without = call(X.clone().requires_grad_()), call(X)
    with pytest.raises(
        RankError, match="argument 0 requires a gradient on rank 0 and not on rank 2: call requires_grad_"
    ):
        check_same(without, with_gradient, 2)
    with pytest.raises(RankError, match="argument 0 requires a gradient on rank 2 and not on rank 0"):
        check_same(with_gradient, without, 2)
    check_same(without, call(X + 1), 2)
