"""Ops that are written in another way compute the same."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.ir.graph.graph import Op, Ref, map_leaves, map_refs
from fxpipe.ir.graph.value_types import ScalarType
from fxpipe.passes.backward.readable_ops import readable
from fxpipe.passes.backward.tracing.record_ops import NOWHERE
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


class Calls(TorchDispatchMode):
    """Notes the functions that the dispatcher runs, with copies of what they take and give."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = copied(args), copied(kwargs or {})
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, *given, copied(made)))
        return made


def copied(nest: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), nest)


def run(sample: Any, info: Any) -> list[tuple[Any, Any, Any, Any]]:
    """What an operator of torch's database runs forward and backward."""
    with Calls() as noted:
        made = info.op(sample.input, *sample.args, **sample.kwargs)
        results = [x for x in tensors(made) if x.requires_grad and x.is_floating_point()]
        leaves = [x for x in tensors((sample.input, sample.args, sample.kwargs)) if x.requires_grad]
        if results:
            torch.autograd.grad([(x * x).sum() for x in results], leaves, allow_unused=True)
    return noted.calls


def tensors(nest: Any) -> Iterator[Tensor]:
    return (x for x in pytree.tree_leaves(nest) if isinstance(x, Tensor))


def rewritten(func: Any, args: Any, kwargs: Any) -> Any:
    """What the op gives as it is written; NotImplemented if that is the same op."""
    given: list[Tensor] = []

    def named(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        given.append(leaf)
        return Ref(str(len(given) - 1))

    args, kwargs = map_leaves((args, dict(kwargs)), named)
    op = readable(Op("made", func, args, kwargs, ScalarType("float"), NOWHERE))
    if op.target is func:
        return NotImplemented
    args, kwargs = map_refs((op.args, dict(op.kwargs)), lambda ref: given[int(ref.name)])
    target = getattr(args[0], op.target) if isinstance(op.target, str) else op.target
    return target(*(args[1:] if isinstance(op.target, str) else args), **kwargs)


# They read memory beside their tensors, or leave elements as they were in memory.
UNKNOWN = {aten.as_strided.default, aten._ctc_loss.default, aten.linalg_lstsq.default}


def is_unknown(func: Any) -> bool:
    return func in UNKNOWN or "empty" in str(func) or torch.Tag.nondeterministic_seeded in func.tags


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_ops_of_torchs_database_give_the_same_as_they_are_written(dtype: torch.dtype) -> None:
    database = importlib.import_module("torch.testing._internal.common_methods_invocations").op_db
    wrong, count = set[str](), 0
    for info in database:
        if dtype not in info.dtypes or info.name.startswith(("sparse.", "jiterator")):
            continue
        graded = info.supports_autograd and dtype.is_floating_point
        for sample in [*info.sample_inputs("cpu", dtype, requires_grad=graded)][:6]:
            try:
                calls = run(sample, info)
            except (RuntimeError, NotImplementedError, TypeError):
                continue  # it has no gradient, or no copy
            for func, args, kwargs, expected in calls:
                if is_unknown(func) or any(x.layout is not torch.strided for x in tensors((args, kwargs, expected))):
                    continue
                found = rewritten(func, args, kwargs)
                if found is not NotImplemented:
                    count += 1
                    wrong |= {str(func)} if not same([*tensors(found)], [*tensors(expected)]) else set()
    assert count > 1000
    assert wrong == set()


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether all have the same elements, bit by bit, but for nan."""
    pairs = [*zip(found, expected, strict=False)]
    return len(found) == len(expected) and all(
        (one.shape, one.dtype) == (two.shape, two.dtype) and torch.allclose(one, two, 0, 0, equal_nan=True)
        for one, two in pairs
    )
