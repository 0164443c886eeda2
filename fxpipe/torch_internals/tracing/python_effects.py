"""What a traced function changes besides tensors: attributes, lists, dicts and variables that are older than the call.

Dynamo changes them after the ops have run, in every call of the kind, whoever asked for what. So part of a trace can
only be used alone if it changes nothing, or it is known what it changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fxpipe.torch_internals.capability import Capability, if_there

from .patched import patched

PYTHON_EFFECTS = Capability(
    what="what a traced function changes besides tensors",
    names=(
        "torch._dynamo.output_graph.OutputGraph.call_user_compiler",
        "torch._dynamo.side_effects.SideEffects.is_modified",
        "torch._dynamo.variables.base.AttributeMutationExisting",
        "torch._dynamo.variables.base.ValueMutationExisting",
    ),
    since="2.5",
    without="all layers are traced with the model: a trace of one alone might leave out a change",
)
UNKNOWN = -1  # the id of no object


@dataclass(frozen=True)
class PythonEffects:
    """What a trace does in Python.

    - `changed`: the ids of the older objects that it changes.
    - `draws`: whether it draws random numbers of Python's.
    - `reached`: the ids of the objects that it might have changed.
    """

    changed: frozenset[int] = frozenset({UNKNOWN})
    draws: bool = True
    reached: frozenset[int] = frozenset()

    @property
    def none(self) -> bool:
        """Whether it does nothing."""
        return not self.changed and not self.draws


@if_there(PYTHON_EFFECTS)
@contextmanager
def python_effects(found: list[PythonEffects]) -> Iterator[None]:
    """A context in which Dynamo adds to `found` what the function does that it has just traced."""
    from torch._dynamo.output_graph import OutputGraph

    compiling = OutputGraph.call_user_compiler

    def call_user_compiler(self: Any, *args: Any, **kwargs: Any) -> Any:
        reached = frozenset(self.side_effects.id_to_variable)
        found.append(PythonEffects(changed(self.side_effects), bool(self.random_calls), reached))
        return compiling(self, *args, **kwargs)

    with patched(OutputGraph, call_user_compiler=call_user_compiler):
        yield


def changed(effects: Any) -> frozenset[int]:
    """The ids of the older objects that a trace has changed by now."""
    from torch._dynamo import variables

    older = variables.base.AttributeMutationExisting, variables.base.ValueMutationExisting
    changed = {
        key
        for key, value in effects.id_to_variable.items()
        if isinstance(value.mutation_type, older) and effects.is_modified(value) and not _is_set_back(effects, value)
    }
    hooks = effects.tensor_hooks or effects.save_for_backward
    return frozenset(changed | {UNKNOWN} if hooks else changed)


def _is_set_back(effects: Any, value: Any) -> bool:
    """Whether an object has in the end the attributes that it had, as after a flag that is set for a while."""
    from torch._dynamo import variables

    if not isinstance(value, variables.UserDefinedObjectVariable):
        return False
    stored, held = effects.store_attr_mutations.get(value, {}), getattr(value.value, "__dict__", {})
    return bool(stored) and all(
        name in held and type(new) is variables.ConstantVariable and _is_same(held[name], new.value)
        for name, new in stored.items()
    )


def _is_same(old: Any, new: Any) -> bool:
    return type(old) is type(new) and type(old) in (type(None), bool, int, str) and old == new
