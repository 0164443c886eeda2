"""Ops that are written in another way compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxpipe.ir.graph.graph import Op, Ref
from fxpipe.ir.graph.value_types import ScalarType
from fxpipe.passes.backward.readable_ops import readable
from fxpipe.passes.backward.record_ops import NOWHERE
from fxpipe.torch_internals.operator_classes import OpOverload, schema

aten = torch.ops.aten
A, B, C = torch.rand(3, 4), torch.rand(3, 4), torch.rand(3, 4)
LOSSES: dict[str, tuple[Any, ...]] = {
    "binary_cross_entropy_with_logits": (A, B),
    "cosine_embedding_loss": (A, B, torch.ones(3)),
    "hinge_embedding_loss": (A, torch.ones(3, 4)),
    "kl_div": (A, B),
    "margin_ranking_loss": (A, B, torch.ones(3, 4)),
    "triplet_margin_loss": (A, B, C),
}


def test_all_losses_with_a_default_are_here() -> None:
    found = set()
    for name in dir(torch):
        func = getattr(getattr(aten, name, None), "default", None)
        if isinstance(func, OpOverload) and "reduction" in {
            argument.name for argument in schema(func).arguments if argument.has_default_value()
        }:
            found.add(name)
    assert found == LOSSES.keys()


@pytest.mark.parametrize("name", LOSSES)
def test_the_default_of_a_loss_is_that_of_the_op(name: str) -> None:
    """In Python, the function of that name in `torch` has another one."""
    func = getattr(aten, name).default
    names = tuple(Ref(f"x{number}") for number in range(len(LOSSES[name])))
    op = readable(Op("loss", func, names, {}, ScalarType("float"), NOWHERE))
    assert op.target is getattr(torch, name)
    made = op.target(*LOSSES[name], **op.kwargs)  # type: ignore[operator]
    assert torch.equal(made, func(*LOSSES[name]))
    assert made.shape == ()
