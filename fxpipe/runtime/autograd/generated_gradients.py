"""What generated backward calls: sums of gradients, and autograd for code that is kept whole.

Gradients of several micro-batches are added at once, not when all of a stage's are there: their memory is taken again
by the next one, and does not have to be fetched anew from the system. A product of matrices is added by the kernel that
computes it.

    g, k, o_vjp = self.o.vjp((0, 1, 2))(h, scale=2.0)       forward: autograd records what the code does
    do_weight, do_bias, dh = gradients_of(o_vjp, dg, dk)    backward

As `torch.func.vjp`, but for the gradients of some of the tensors that the code is given or reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.torch_internals.pytrees import tree_flatten, tree_unflatten
from fxpipe.torch_internals.tensor_memory import memory_key

from .contiguous_layout import contiguous

Call = Callable[[Sequence[Tensor], tuple[Any, ...], Mapping[str, Any]], Any]  # of the code's tensors, its arguments


def accumulate(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """The gradient, added in place to `total`, the sum of those before it; itself if it is the first. None counts as
    nothing: code that is kept whole may have no gradient for a tensor."""
    if gradient is None:
        return total
    return gradient if total is None else total.add_(gradient)


def accumulate_mm(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """`accumulate(total, torch.mm(left, right))`, without a matrix for the product."""
    return torch.mm(left, right) if total is None else total.addmm_(left, right)


class Vjp(NamedTuple):
    """What autograd has recorded of one run.

    - `results`: the tensors that the code has returned; `sources`: those whose gradients are asked for.
    """

    results: Sequence[Tensor]
    sources: Sequence[Tensor]


def gradients_of(vjp: Vjp, *grads: Tensor | None, zeros: Collection[int] = ()) -> list[Tensor | None]:
    """The gradients of the sources, once. `grads`: those of the results. None for a source that the results do not
    depend on in this run, as in autograd; at the places `zeros`, zeros in place of None."""
    pairs = [(x, g) for x, g in zip(vjp.results, grads, strict=True) if g is not None and x.requires_grad]
    wanted = [x for x in vjp.sources if x.requires_grad] if pairs else []
    found: dict[int, Tensor | None] = {}
    if wanted:
        results, given = zip(*pairs, strict=True)
        got = torch.autograd.grad(results, wanted, given, allow_unused=True)
        found = dict(zip(map(id, wanted), got, strict=True))
    taken = {memory_key(g) for _, g in pairs}
    return [
        torch.zeros_like(x) if grad is None and place in zeros else _own(grad, taken)
        for place, (x, grad) in enumerate((x, found.get(id(x))) for x in vjp.sources)
    ]


def _own(grad: Tensor | None, taken: set[int]) -> Tensor | None:
    """The gradient in memory of its own, since later ones may be added to it."""
    if grad is None or grad.layout is not torch.strided:
        return grad
    grad = contiguous(grad)
    if memory_key(grad) in taken:
        return grad.clone()
    taken.add(memory_key(grad))
    return grad


def with_vjp(
    call: Call, of: Collection[int], tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The tensors that `call(tensors, args, kwargs)` returns, without a graph, and a `Vjp` of it. `of`: the places of
    the tensors whose gradients are wanted, among all leaves of `(tensors, args, kwargs)`."""
    leaves, nest = tree_flatten((list(tensors), args, dict(kwargs)))
    sources = {place: leaves[place] for place in sorted(of)}
    for place, x in sources.items():
        if place >= len(tensors):
            leaves[place] = sources[place] = x.detach().requires_grad_()
    with torch.enable_grad():
        found = call(*tree_unflatten(leaves, nest))
    results = found if isinstance(found, tuple) else (found,)
    return (*(contiguous(x.detach()) for x in results), Vjp(results, [*sources.values()]))
