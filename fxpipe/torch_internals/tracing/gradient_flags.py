"""`requires_grad` of tensors that forward has made, which Dynamo lets nobody set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fxpipe.torch_internals.capability import Capability, if_there

from .patched import patched

GRADIENT_FLAGS = Capability(
    what="how a trace sets requires_grad of a tensor",
    names=(
        "torch._dynamo.variables.builtin.SetAttrBuiltinVariable._call_setattr",
        "torch._dynamo.variables.TensorVariable.method_requires_grad_",
    ),
    since="2.13",
    without="models that let a tensor of their own require a gradient are kept whole or refused",
)


@if_there(GRADIENT_FLAGS)
@contextmanager
def gradients_that_nobody_gets() -> Iterator[None]:
    """A context in which `h.requires_grad = True` and `h.requires_grad_()`, which Dynamo refuses, do nothing if h was
    made in forward. Models do this so that checkpoints work while their first layers are frozen; it changes no visible
    gradient."""
    from torch._dynamo import variables

    kind: Any = variables.builtin.SetAttrBuiltinVariable
    values: Any = variables.TensorVariable
    refusing, refusing_call = kind._call_setattr, values.method_requires_grad_

    def setting(self: Any, tx: Any, owner: Any, name: Any, value: Any) -> Any:
        asked = name.is_python_constant() and name.as_python_constant() == "requires_grad"
        made_here = owner.is_tensor() and owner.source is None
        if asked and made_here and value.is_python_constant() and value.as_python_constant() is True:
            owner.requires_grad = True  # for who asks later
            return value
        return refusing(self, tx, owner, name, value)

    def calling(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        on = requires_grad if isinstance(requires_grad, bool) else requires_grad.as_python_constant()
        if self.source is not None or on is not True:
            return refusing_call(self, tx, requires_grad)
        self.requires_grad = True
        return self

    found: dict[str, Any] = {"method_requires_grad_": calling}
    if method := getattr(values, "tp_methods", {}).get("requires_grad_"):  # the table of torch 2.15
        found["tp_methods"] = values.tp_methods | {"requires_grad_": type(method)(calling)}
    with patched(kind, _call_setattr=setting), patched(values, **found):
        yield
