"""Sizes and numbers that may vary from one call to the next: symbols in a trace, and the guards on them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, fx

from fxpipe.torch_internals.capability import Capability

DYNAMIC_SIZES = Capability(
    what="symbols for sizes and numbers that may vary",
    names=(
        "torch._dynamo.source.ConstantSource",
        "torch._dynamo.source.TensorProperty",
        "torch._dynamo.source.TensorPropertySource",
        "torch.fx.experimental.symbolic_shapes.DimDynamic",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv",
        "torch.fx.experimental.symbolic_shapes.StatelessSymbolicContext",
        "torch.fx.experimental.symbolic_shapes.free_unbacked_symbols",
        "torch.utils._sympy.printers.PythonPrinter",
    ),
    since="2.4",
    without="nothing is captured: a graph would be for one batch size",
)


def printed(expression: Any) -> str:
    """An expression over symbols as Python."""
    from torch.utils._sympy.printers import PythonPrinter

    class Printer(PythonPrinter):
        """torch's own, whose names are those of ours."""

        def _print_Symbol(self, expr: Any) -> str:
            return str(expr.name)

    return str(Printer().doprint(expression))


def unknown_size() -> type[Exception]:
    """What an op raises that asks for a size or number which data decides."""
    from torch.fx.experimental import symbolic_shapes

    return symbolic_shapes.GuardOnDataDependentSymNode


def depends_on_data(value: Any) -> bool:
    """Whether a size, or one of a tensor's, is known only when the op that makes it has run."""
    from torch.fx.experimental import symbolic_shapes

    return bool(symbolic_shapes.free_unbacked_symbols(value))


def holds(env: Any, expression: Any) -> bool:
    """Whether an expression over symbols is true in a trace, which gets a guard of it."""
    from torch.fx.experimental.sym_node import SymNode

    return bool(SymNode(expression, env, bool, None).guard_bool("", 0))


def one_symbol_a_size() -> AbstractContextManager[Any]:
    """A context in which no two sizes get the same symbol for having the same number."""
    from torch.fx.experimental import _config

    found: AbstractContextManager[Any] = _config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    return found


def source_of(placeholder: fx.Node) -> Any:
    """Where the value of a placeholder comes from, as Dynamo says it; None if it does not."""
    return getattr(placeholder.meta.get("grapharg"), "source", None)


def is_of_tensor(origin: Any) -> bool:
    """Whether a value that varies, with this source, is a size, stride or offset of a tensor."""
    from torch._dynamo import source

    return isinstance(origin, source.TensorPropertySource)


def size_of_tensor(origin: Any) -> tuple[Any, int] | None:
    """The source of a tensor and a dimension of it, if a value that varies, with this source, is its size there."""
    from torch._dynamo import source

    is_size = is_of_tensor(origin) and origin.prop is source.TensorProperty.SIZE
    return (origin.base, origin.idx) if is_size and origin.idx is not None else None


class VaryingNumbers:
    """Symbols for the numbers and sizes of one graph; `env` has their guards."""

    def __init__(self) -> None:
        from torch._dynamo import source
        from torch.fx.experimental import symbolic_shapes

        self.env = symbolic_shapes.ShapeEnv(duck_shape=False)
        self._source: Any = source.ConstantSource
        self._shapes: Any = symbolic_shapes

    def whole(self, value: int, name: str) -> Any:
        """A whole number that varies, with this value while tracing."""
        return self.env.create_unspecified_symint_and_symbol(value, self._source(name), self._shapes.DimDynamic.DYNAMIC)

    def floating(self, value: float, name: str) -> Any:
        """A float that varies, with this value while tracing."""
        symbol = self.env.create_unspecified_symbol(value, self._source(name), self._shapes.DimDynamic.DYNAMIC)
        return self.env.create_symfloatnode(symbol, hint=value)

    def tensor(self, mode: Any, tensor: Tensor, name: str, varies: Sequence[bool]) -> Tensor:
        """The tensor in a mode of tensors without memory; the sizes of dimensions that vary are symbols."""
        source, kinds = self._source(name), self._shapes.DimDynamic
        if not any(varies):
            return mode.from_tensor(tensor, static_shapes=True, source=source)  # type: ignore[no-any-return]
        sizes = [kinds.DYNAMIC if one else kinds.STATIC for one in varies]
        context: Any = self._shapes.StatelessSymbolicContext(dynamic_sizes=sizes)
        return mode.from_tensor(tensor, source=source, symbolic_context=context)  # type: ignore[no-any-return]
