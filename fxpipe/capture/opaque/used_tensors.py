"""What a method uses of its module: a run shows which tensors of the module take part in ops.

self.visual(x)             visual      a submodule that is called counts as a whole: it may take another branch
features + self.newline    newline     a tensor that the method reads itself
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fxpipe.ir.graph.module_parts import is_used, slots
from fxpipe.ir.graph.opaque_call import addresses
from fxpipe.torch_internals.op_modes import TorchDispatchMode
from fxpipe.torch_internals.pytrees import tree_leaves

CALLS = "_call_impl"  # of nn.Module: calls forward


class Uses:
    """What is used of a module in the context `noted()`: the paths in it of submodules with tensors that are called,
    and of other tensors, are added to `found`."""

    def __init__(self, module: nn.Module, found: set[str]) -> None:
        self.found = found
        self.modules = {id(part): path for path, part in module.named_modules() if path}
        self.paths: dict[int, list[str]] = {}
        for path, part, key in slots(module):
            for address in addresses(getattr(part, key)):
                self.paths.setdefault(address, []).append(path)

    @contextmanager
    def noted(self) -> Iterator[None]:
        with _Functions(self), _Ops(self):
            yield

    def note(self, args: Any, kwargs: Mapping[str, Any] | None) -> None:
        for given in tree_leaves((args, dict(kwargs or {}))):
            for address in _addresses(given) if isinstance(given, Tensor) else ():
                if (paths := self.paths.get(address)) is not None:
                    called = self._called()
                    inside = called is not None and any(is_used(path, {called}) for path in paths)
                    self.found.add(called if called is not None and inside else paths[0])

    def _called(self) -> str | None:
        """The outermost submodule whose forward is running."""
        found, frame = None, sys._getframe().f_back
        while frame is not None:
            if frame.f_code.co_name == CALLS:
                found = self.modules.get(id(frame.f_locals.get("self")), found)
            frame = frame.f_back
        return found


def _addresses(given: Tensor) -> set[int]:
    try:
        return addresses(given)
    except (NotImplementedError, RuntimeError):  # a transform of torch.func has wrapped it, and an op inside shows it
        return set()


class _Functions(TorchFunctionMode):
    def __init__(self, uses: Uses) -> None:
        super().__init__()
        self.uses = uses

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.uses.note(args, kwargs)
        return func(*args, **(kwargs or {}))


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, uses: Uses) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses = uses

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.uses.note(args, kwargs)
        return func(*args, **(kwargs or {}))
