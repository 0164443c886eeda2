"""The twin of a module of `torch.jit.script` or `torch.jit.trace`, whose code and tensors are not in Python.

    script module                        twin
      ._parameters  of C++                 ._parameters  a dict: tensors without memory, as in all twins
      .forward      compiled code          .forward      calls that code with the twin's tensors

Nothing of it is traced: it is kept whole from the start (`opaque_submodules.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fxpipe.ir.graph.module_parts import holding, slots

WHY = "it is made by torch.jit.script or torch.jit.trace, so that its code is not Python's"
NAMES = frozenset(vars(nn.Module())) - {"training"}


class ScriptTwin(nn.Module):
    """The twin of `script`, or of a submodule of one."""

    script: torch.jit.ScriptModule

    def follow(self, script: torch.jit.ScriptModule, of: Callable[[Any], Any]) -> None:
        """Be what the script module is now. `of` gives the copy of a part of it. What else it has that is no tensor,
        such as numbers and compiled methods, is there for the modules around it."""
        own = vars(self)
        own.update(script=script, training=is_training(script))
        own.update({name: of(getattr(script, name, None)) for name in NAMES})
        for name in others(script):
            value = getattr(script, name, None)
            own[name] = self._method(name) if isinstance(value, torch.ScriptMethod) else value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._called("forward", args, kwargs)

    def _method(self, name: str) -> Callable[..., Any]:
        return vars(self).get(name) or (lambda *args, **kwargs: self._called(name, args, kwargs))

    def _called(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with holding([*self.script.named_modules()], [getattr(part, key) for _, part, key in slots(self)]):
            return getattr(self.script, name)(*args, **kwargs)


class SequentialTwin(ScriptTwin, nn.Sequential):
    """The twin of a scripted `nn.Sequential`, whose layers may be called one by one."""


class ListTwin(ScriptTwin, nn.ModuleList):
    """The twin of a scripted `nn.ModuleList`."""


class DictTwin(ScriptTwin, nn.ModuleDict):
    """The twin of a scripted `nn.ModuleDict`."""


CONTAINERS: Mapping[Any, type[ScriptTwin]] = {
    nn.Sequential.__getitem__: SequentialTwin,
    nn.ModuleList.__getitem__: ListTwin,
    nn.ModuleDict.__getitem__: DictTwin,
}


def empty_twin(script: torch.jit.ScriptModule) -> ScriptTwin:
    """A twin without contents. torch hangs the methods of a container on the scripted one."""
    method = getattr(vars(script).get("__getitem__"), "__func__", None)
    kind = CONTAINERS.get(method, ScriptTwin)
    return kind.__new__(kind)


def is_training(script: torch.jit.ScriptModule) -> bool:
    """Whether it is in training mode; a frozen one has no mode."""
    return bool(getattr(script, "training", False))


def is_script_dict(value: Any) -> bool:
    """Whether it is the view of a script module's tensors or submodules that stands for a dict."""
    return type(value).__module__ == torch.jit.ScriptModule.__module__ and hasattr(value, "items")


def beside_python(module: Any) -> list[str]:
    """The names of what may change of a script module and is in no attribute of the Python object."""
    return ["training", *tensor_names(module)] if isinstance(module, torch.jit.ScriptModule) else []


def tensor_names(script: torch.jit.ScriptModule) -> list[str]:
    """The names of its own parameters and buffers."""
    return [*script._parameters.keys(), *script._buffers.keys()]


def others(script: torch.jit.ScriptModule) -> list[str]:
    """The names of its attributes, constants and methods, without its tensors, submodules and forward."""
    kind = getattr(script, "_concrete_type", None)
    known = () if kind is None else (*kind.get_attributes(), *kind.get_constants())
    compiled: Any = getattr(script, "_c", None)
    methods = () if compiled is None else compiled._method_names()
    taken = {*tensor_names(script), *script._modules.keys(), *NAMES, "forward", "training"}
    return [name for name in (*known, *methods) if name not in taken]


def forward_signature(model: nn.Module, *, follow_wrapped: bool = True) -> inspect.Signature:
    """What forward takes; of a script module, by its schema."""
    forward: Any = model.forward
    if not isinstance(forward, torch.ScriptMethod):
        return inspect.signature(forward, follow_wrapped=follow_wrapped)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    _, *arguments = forward.schema.arguments  # without self
    return inspect.Signature(
        [
            inspect.Parameter(
                one.name,
                kinds[one.kwarg_only],
                default=one.default_value if one.has_default_value() else inspect.Parameter.empty,
            )
            for one in arguments
        ]
    )
