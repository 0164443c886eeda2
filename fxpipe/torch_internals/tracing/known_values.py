"""Numbers and truth values of tensors whose values are known while a model is traced.

Dynamo takes what `item()` and `tolist()` return for numbers that depend on data, and refuses `if` with a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx

from fxpipe.torch_internals.capability import Capability, if_there

from .patched import patched

KNOWN_VALUES = Capability(
    what="calls of methods of the tensors of a trace, and the step to the next instruction",
    names=(
        "torch._dynamo.variables.TensorVariable.call_method",
        "torch._dynamo.variables.base.VariableTracker.build",
        "torch._dynamo.symbolic_convert.InstructionTranslatorBase.step",
    ),
    since="2.5",
    without="models that ask for values of inputs, or of tensors made of constants, are kept whole or refused",
)
METHODS = frozenset({"tolist", "item"})
# Python 3.11 has more of them than later ones: also JUMP_IF_..._OR_POP, which may leave what they have looked at.
ASKING = ("POP_JUMP_IF", "POP_JUMP_FORWARD_IF", "POP_JUMP_BACKWARD_IF", "JUMP_IF", "UNARY_NOT")


@if_there(KNOWN_VALUES)
@contextmanager
def known_values(value_of: Callable[[fx.Node, bool], Tensor | None]) -> Iterator[None]:
    """A context in which Dynamo reads values of tensors as plain Python does, where `value_of(node, truth)` knows the
    one of a node; `truth`: only whether it is true is asked."""
    from torch._dynamo import symbolic_convert, variables

    kind, build = variables.TensorVariable, variables.base.VariableTracker.build
    translator = symbolic_convert.InstructionTranslatorBase
    tracing, stepping = kind.call_method, translator.step

    def known(variable: Any, truth: bool = False) -> Tensor | None:
        node = variable.as_proxy().node
        return value_of(node, truth) if isinstance(node, fx.Node) else None

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in METHODS and not args and not kwargs and (value := known(self)) is not None:
            return build(tx, getattr(value, name)())
        return tracing(self, tx, name, args, kwargs)

    def step(self: Any) -> bool:
        asks = self.stack and type(self.stack[-1]) is kind and _asks(self)
        value = known(self.stack[-1], truth=True) if asks else None
        if value is None or value.numel() != 1:
            return stepping(self)
        given, truth = self.stack[-1], build(self, bool(value))
        self.stack[-1] = truth
        more = stepping(self)
        if self.stack and self.stack[-1] is truth:
            self.stack[-1] = given
        return more

    with patched(kind, call_method=call_method), patched(translator, step=step):
        yield


def _asks(translator: Any) -> bool:
    """Whether the next instruction asks whether what is on top of the stack is true."""
    if translator.instruction_pointer is None:
        return False
    name: str = translator.instructions[translator.instruction_pointer].opname
    return name.startswith(ASKING) and not name.endswith("_NONE")
