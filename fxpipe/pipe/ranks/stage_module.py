"""A rank's part of the model as a module of its own, for functions that parallelise modules.

    model                part of rank 1            modules of the model's own classes, with the model's own names and
      layers               layers                  tensors, but only the tensors of this rank's stages; hooks and
        0  Linear            2  Linear             tensors that are set on the part do not change the model
        1  Linear            3  Linear
        2  Linear
        3  Linear

Its forward is not the model's: the stages compute. After a step, its backward gives the parameters the gradients of the
stages, so that the hooks of DistributedDataParallel and FSDP2 see each gradient once, as in any other backward.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Graded = tuple[Tensor, Tensor]  # a parameter, and its gradient of a step


class Part(nn.Module):
    """The tensors of the model whose ids are in `own`."""

    _graded: Sequence[Graded]

    def __init__(self, model: nn.Module, own: Collection[int]) -> None:
        super().__init__()
        self.training = model.training
        take(model, self, own, {})
        object.__setattr__(self, "_graded", ())  # as in `set_graded`

    def set_graded(self, graded: Sequence[Graded]) -> None:
        """The gradients of the next backward."""
        object.__setattr__(self, "_graded", graded)  # not nn.Module's: the model may have a submodule of any name

    def forward(self) -> Tensor:
        """A number whose backward gives the parameters the gradients of `set_graded`."""
        graded = self._graded
        found: Tensor = Carrier.apply([grad for _, grad in graded], *[p for p, _ in graded])  # type: ignore[no-untyped-call]
        return found


class Carrier(torch.autograd.Function):
    """An autograd function whose gradients by its parameters are given."""

    @staticmethod
    def forward(ctx: Any, grads: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.grads = grads
        return torch.zeros((), device=parameters[0].device if parameters else None)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        grads, ctx.grads = ctx.grads, ()
        return None, *grads


def add_through(module: nn.Module, part: Part, graded: list[Graded], averaged: Sequence[nn.Parameter] = ()) -> None:
    """Add gradients to those of the part's parameters, by a backward of `module`, which wraps the part. `averaged`: the
    parameters that DistributedDataParallel waits for: those that have no gradient in this step, or have been frozen
    since, get zeros for it, and are left as they were. Empties `graded`: autograd copies what anyone else holds."""
    given = {id(parameter) for parameter, _ in graded}
    idle = [(p, p.grad, p.requires_grad) for p in averaged if id(p) not in given]
    for parameter, _, _ in idle:
        parameter.requires_grad_(True)
    part.set_graded([*graded, *((p, torch.zeros_like(p)) for p, _, _ in idle)])
    graded.clear()
    try:
        loss = module()
        part.set_graded(())
        if loss.requires_grad:
            loss.backward()
    finally:
        part.set_graded(())
        for parameter, grad, trains in idle:
            parameter.grad = grad
            parameter.requires_grad_(trains)


def take(module: nn.Module, made: nn.Module, own: Collection[int], known: dict[nn.Module, nn.Module]) -> None:
    """Put the tensors of `module` whose ids are in `own`, and submodules that have such tensors, into `made`. What is
    None in the model, such as the bias of a layer without one, is None in the part."""
    made._parameters.update({name: p for name, p in module._parameters.items() if p is None or id(p) in own})
    made._buffers.update({name: b for name, b in module._buffers.items() if b is None or id(b) in own})
    made._non_persistent_buffers_set.update(module._non_persistent_buffers_set & made._buffers.keys())
    for name, child in module._modules.items():
        if child is not None and any(id(x) in own for x in (*child.parameters(), *child.buffers())):
            if child not in known:
                known[child] = like(child)
                take(child, known[child], own, known)
            made._modules[name] = known[child]


def like(module: nn.Module) -> nn.Module:
    """An empty module of the same class, with the same attributes, and no hooks; for a script module a plain one."""
    if isinstance(module, torch.jit.ScriptModule):
        return nn.Module()
    made = type(module).__new__(type(module))
    nn.Module.__init__(made)
    made.__dict__.update({name: value for name, value in module.__dict__.items() if name not in made.__dict__})
    made.training = module.training
    return made
