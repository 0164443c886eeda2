"""The gradient of every operator in torch's own database of operators: generated backward gives what autograd gives."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxpipe
from tests.helpers.marks import slow_in_turn

X = torch.rand(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PARTS = 16


class Applied(nn.Module):
    """A number for each sample, of all that an operator makes of the model's own tensors."""

    def __init__(self, operator: Callable[..., Any], given: Any) -> None:
        super().__init__()
        self.operator = operator
        leaves, self.spec = pytree.tree_flatten(given)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                own = leaf.detach().clone()
                if leaf.requires_grad:
                    self.register_parameter(f"p{place}", nn.Parameter(own))
                else:
                    self.register_buffer(f"p{place}", own)
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def forward(self, x: Tensor) -> Tensor:
        leaves = [getattr(self, f"p{place}", leaf) for place, leaf in enumerate(self.others)]
        leaves = [leaf * 1 if isinstance(leaf, nn.Parameter) else leaf for leaf in leaves]  # some write their argument
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        total = torch.zeros((), dtype=torch.float64)
        for made in pytree.tree_leaves(self.operator(first, *args, **kwargs)):
            if isinstance(made, Tensor) and made.requires_grad:
                real = torch.view_as_real(made) if made.is_complex() else made
                total = total + (real * torch.cos(real.detach())).sum()
        return x.sum(1) * total


def gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def plain(model: nn.Module) -> list[Tensor]:
    """The gradients of the model's parameters, summed over two micro-batches."""
    torch.manual_seed(0)
    for part in X.chunk(2):
        (model(part).mean() / 2).backward()
    return gradients(model)


def check(model: nn.Module, expected: list[Tensor], checkpoint: str = "never") -> str:
    """Assert that the gradients of a step are these. Returns why they are autograd's; "" if they are generated."""
    model.zero_grad()
    torch.manual_seed(0)
    torch._dynamo.reset()  # a model's forward is traced for too many operators
    with closing(fxpipe.compile(model, devices=1, chunks=2, backward="code", checkpoint=checkpoint)) as pipe:
        pipe.step(X, loss_fn=torch.mean)
        torch.testing.assert_close(gradients(model), expected, rtol=1e-9, atol=1e-9, equal_nan=True)
        return pipe.build.program.stages[0].autograd_because


@pytest.mark.parametrize(
    ("operator", "given"),
    [
        (lambda x: x[:, [0, 2]], (torch.rand(2, 3),)),
        (lambda x, at: x[:, at], (torch.rand(2, 3), torch.tensor([0, 2, 2]))),
        (lambda x: x[[1, 0]][..., None, [2, 1]], (torch.rand(2, 3),)),
        (torch.max, (torch.rand(2, 3),)),
        (torch.copysign, (torch.rand(()), torch.rand(()))),
    ],
    ids=["a list in an index", "a tensor in an index", "lists in indices", "one number of all", "numbers"],
)
def test_operators_that_python_spells_differently(operator: Callable[..., Any], given: tuple[Any, ...]) -> None:
    """torch.index_put takes no None among its indices, and there is no x.expand() without sizes."""
    leaves = [x.double().requires_grad_() if x.is_floating_point() else x for x in given]
    model = Applied(operator, (leaves[0], tuple(leaves[1:]), {}))
    assert check(model, plain(model)) == ""


# Why a stage keeps autograd: none of these names an operator that backward as code could know.
KEPT = "kept whole|layout of memory|which forward writes|size .* cannot be computed|a size that only a run tells"
LEFT_OUT = r"sparse\..*"  # sparse tensors are refused


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", slow_in_turn(range(PARTS), 4))
def test_operators_of_torchs_database(part: int) -> None:
    database = importlib.import_module("torch.testing._internal.common_methods_invocations").op_db
    wrong, kept = [], []
    for place, info in [*enumerate(database)][part::PARTS]:
        name = f"{info.name}.{info.variant_test_name}".rstrip(".")
        if re.fullmatch(LEFT_OUT, name) or not info.supports_autograd or torch.float64 not in info.dtypes:
            continue
        torch.manual_seed(1)
        found = list(info.sample_inputs("cpu", torch.float64, requires_grad=True))
        sample = found[place % len(found)]
        model = Applied(info.op, (sample.input, sample.args, sample.kwargs))
        try:
            expected = plain(model)
        except RuntimeError:
            continue  # it has no gradient
        try:
            because = check(model, expected, ("never", "selective")[place % 2])
        except Exception as error:
            wrong.append(f"{name}: {error}")
        else:
            kept += [f"{name}: {because}"] if because and not re.search(KEPT, because) else []
    assert wrong == []
    assert kept == []
