"""Sizes and numbers that may vary from one call to the next: symbols in a trace, and the guards on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource, TensorProperty, TensorPropertySource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.printers import PythonPrinter

from fxpipe.torch_internals.capability import Capability

DYNAMIC_SIZES = Capability(
    what="symbols for sizes and numbers that may vary",
    names=(
        "torch._dynamo.maybe_mark_dynamic",
        "torch._dynamo.source.ConstantSource",
        "torch._dynamo.source.TensorProperty",
        "torch._dynamo.source.TensorPropertySource",
        "torch.fx.experimental.symbolic_shapes.DimDynamic",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv",
        "torch.fx.experimental.symbolic_shapes.StatelessSymbolicContext",
        "torch.utils._sympy.printers.PythonPrinter",
    ),
    since="2.4",
    without="fxpipe does not start: a graph would be for one batch size",
    needed=True,
)


class Printer(PythonPrinter):
    """Python as it may stand in a file: torch's own, whose names are those of ours."""

    def _print_Symbol(self, expr: Any) -> str:
        return str(expr.name)


def printed(expression: Any) -> str:
    """An expression over symbols as Python."""
    return str(Printer().doprint(expression))


def let_vary(tensor: Tensor, dim: int) -> None:
    """Let this size of the tensor be a symbol in the next trace, unless forward asks for a number."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def is_of_tensor(source: Any) -> bool:
    """Whether a value that varies is a size, stride or offset of a tensor."""
    return isinstance(source, TensorPropertySource)


def size_of_tensor(source: Any) -> tuple[Any, int] | None:
    """The source of a tensor and a dimension of it, if a value that varies is its size there."""
    if isinstance(source, TensorPropertySource) and source.prop is TensorProperty.SIZE and source.idx is not None:
        return source.base, source.idx
    return None


class VaryingNumbers:
    """Symbols for the numbers and sizes of one graph; `env` has their guards."""

    def __init__(self) -> None:
        self.env = ShapeEnv(duck_shape=False)

    def whole(self, value: int, name: str) -> Any:
        """A whole number that varies, with this value while tracing."""
        return self.env.create_unspecified_symint_and_symbol(value, ConstantSource(name), DimDynamic.DYNAMIC)

    def floating(self, value: float, name: str) -> Any:
        """A float that varies, with this value while tracing."""
        symbol = self.env.create_unspecified_symbol(value, ConstantSource(name), DimDynamic.DYNAMIC)
        return self.env.create_symfloatnode(symbol, hint=value)

    def tensor(self, mode: Any, tensor: Tensor, name: str, varies: Sequence[bool]) -> Tensor:
        """The tensor in a mode of tensors without memory; the sizes of dimensions that vary are symbols."""
        source = ConstantSource(name)
        if not any(varies):
            return mode.from_tensor(tensor, static_shapes=True, source=source)  # type: ignore[no-any-return]
        sizes = [DimDynamic.DYNAMIC if one else DimDynamic.STATIC for one in varies]
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        return mode.from_tensor(tensor, source=source, symbolic_context=context)  # type: ignore[no-any-return]
