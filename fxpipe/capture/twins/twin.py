"""Twins of the user's modules: what capture works on, so that the user's own are only read.

    model                   twin
      .blocks  ModuleList     .blocks  ModuleList of twins
      .scale   0.5            .scale   0.5, the very same object
      .run     bound method   .run     the method of the twin
      .weight  Parameter      .weight  a tensor of the same size without memory

A twin has the same class as its module, and its own attributes. So Dynamo can trace and guard it, and attributes that a
dry pass of forward sets are not visible to other threads, which may read, run, copy or capture the model meanwhile.
Before each call, the twins are updated with the user's changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.modules.module as module_hooks
from torch import Tensor, nn

from fxpipe.capture.nested_values import Memo, Swap, change
from fxpipe.capture.tracing.storageless_tensors import hollow
from fxpipe.errors import CaptureError
from fxpipe.ir.graph.module_parts import SET_NO_PARAMETER

from .attribute_changes import PARTS
from .change_watch import FACTS, Watch
from .hook_lists import Lists
from .script_twin import NAMES, is_script_dict
from .twin_copies import Copies, Originals, slots_of

HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks",
)  # fmt: skip
LOOKING = ("_forward_pre_hooks", "_forward_hooks")  # those that see values
_GLOBAL = "forward_pre_hooks forward_hooks forward_hooks_always_called backward_pre_hooks backward_hooks"
GLOBAL_HOOKS: list[dict[int, Any]] = [getattr(module_hooks, f"_global_{name}") for name in _GLOBAL.split()]

Roots = Mapping[str, nn.Module]  # by what the paths of their tensors begin with: "" for the model
StandIn = Callable[["Slot", Tensor], Tensor]


@dataclass
class Slot:
    """A parameter or buffer of the model: where it hangs, the real tensor there, and its stand-in in the twin's dict,
    `own`."""

    tensors: dict[str, Tensor | None]
    key: str
    path: str
    kind: str
    device: torch.device
    own: dict[str, Tensor | None]
    real: Tensor | None = None
    twin: Tensor | None = None


def hollow_one(slot: Slot, real: Tensor) -> Tensor:
    """What stands in for a real tensor while a model is traced."""
    return as_held(slot, real, hollow(real, slot.device))


def as_held(slot: Slot, real: Tensor, made: Tensor) -> Tensor:
    """What stands in for a real tensor as its module holds it: a parameter, which a copied script module has as a plain
    tensor, is one."""
    held = isinstance(real, nn.Parameter) or (slot.kind == "parameter" and is_script_dict(slot.tensors))
    return nn.Parameter(made.detach(), real.requires_grad) if held and not isinstance(made, nn.Parameter) else made


class Twins:
    """The twins of the model's modules, and of the modules of its loss function.

    - `roots`: these modules, by the prefix of their tensors' paths; shared submodules belong to the first.
    - `stand_in`: makes the twins' tensors. They stay on the model's first devices, wherever the real tensors go.
    - `first_devices`: these devices, by the paths of the tensors.
    - `in_place_of_meta`: the device of all of them if a part of the model was on the meta device, where autocast and
      the model's own questions about devices would have other answers than in a call that runs.
    - `frozen_later`: whether stand-ins of tensors that no longer need a gradient still do: over ranks, only the rank
      that has a tensor knows that it was frozen since, and all ranks must capture the same.
    - `slots`: all parameters and buffers; `buffers`: those of them that are buffers.
    - `slot_by_id`: the slots by the ids of stand-ins and real tensors (forward may reach those by a global variable).
    - `device`: that of all stand-ins, if they share one; else None.
    - `version`: counts how often tensors of the model were replaced.
    - `structure_token`: an object that is replaced when modules are added or removed.
    """

    def __init__(self, roots: Roots, stand_in: StandIn = hollow_one) -> None:
        self.roots = roots
        self.stand_in = stand_in
        self.slots: list[Slot] = []
        self.buffers: list[Slot] = []
        self.slot_by_id: dict[int, Slot] = {}
        self.device: torch.device | None = None
        self.version = 0
        self._hooks: list[tuple[int, ...]] = []
        self._slot_changes = 0
        self.structure_token: object = None
        self.copies = Copies()
        self._beside = Copies(self.copies)  # of what is no part of the modules: of the last loss function
        self.first_devices: dict[str, torch.device] = {}
        self.in_place_of_meta = torch.device("meta")
        self.frozen_later = False
        # What stands in for methods: the twin and the function, by the id of the twin and the name of the method.
        self._methods: dict[tuple[int, str], tuple[Any, Callable[..., Any]]] = {}
        self._structure: set[int] = set()  # the ids of the dicts that a module hangs its parts in
        self._hook_dicts: dict[int, list[Any]] = {}  # all of its module, by the id of each
        self._lists = Lists()
        self._watch = Watch(())

    # What is known of the modules ------------------------------------------------------------------------------------

    @property
    def root(self) -> nn.Module:
        """The twin of the model."""
        found: nn.Module = self.twin(self.roots[""])
        return found

    def twin(self, module: nn.Module) -> Any:
        """The twin of a module."""
        return self.copies.memo[id(module)][1]

    def original(self, twin: Any) -> Any:
        """Whose twin it is; anything else is its own."""
        return self._beside.original(twin)

    def named(self) -> list[tuple[str, nn.Module]]:
        """The twins of all modules, each under its first path."""
        return [(path, self.twin(module)) for path, module in self._named()]

    def _named(self) -> list[tuple[str, nn.Module]]:
        seen: set[nn.Module] = set()
        return [pair for prefix, root in self.roots.items() for pair in root.named_modules(seen, prefix)]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The real tensors, by path."""
        return {slot.path: slot.real for slot in self.slots if slot.real is not None}

    @property
    def latest_change(self) -> object:
        """Another object whenever the user has changed something."""
        return self._watch

    @property
    def unguarded(self) -> tuple[Any, ...]:
        """Another value once something changed that Dynamo has no guards for: hooks, which torch numbers, those of all
        modules included; and attributes that are not in a `__dict__`."""
        return self._slot_changes, self._hooks, [tuple(hooks.items()) for hooks in GLOBAL_HOOKS]

    def reached(self, objects: Iterable[Any]) -> tuple[nn.Module, ...]:
        """The user's own modules among these objects."""
        return tuple({id(x): x for x in objects if isinstance(x, nn.Module) and id(x) in self.copies.memo}.values())

    def with_stand_ins(self, stand_in: StandIn) -> Twins:
        """Other twins of the same modules, with tensors of another kind."""
        made = Twins(self.roots, stand_in)
        made.first_devices, made.in_place_of_meta = self.first_devices, self.in_place_of_meta
        made.sync()
        return made

    def twinned(self, *values: Any) -> tuple[Any, ...]:
        """What is given to forward besides tensors, such as a loss function, with twins for what it reaches of the
        modules. Holds until it is asked for again."""
        copies = Copies(self.copies, self._beside)
        found = tuple(map(copies.of, values))
        copies.last = {}
        self._beside = copies
        return found

    # What the user changes -------------------------------------------------------------------------------------------

    def watch(self, roots: Roots) -> None:
        """Take these modules instead."""
        if list(map(id, roots.values())) != list(map(id, self.roots.values())) or list(roots) != list(self.roots):
            self.roots = roots
            self.structure_token = None

    def sync(self) -> None:
        """Make the twins what the modules are now. Raises CaptureError for a parameter without a shape."""
        if self.structure_token is not None and self._watch.still():
            return
        token, self.structure_token = self.structure_token, None  # until all went well
        changed = self._watch.changed() if token is not None else None
        if changed is None or any(id(item) in self._structure for item in changed):
            self._build()
            token = object()
        else:
            self.copies.forget()
            for item in changed:
                self._slot_changes += bool(slots_of(type(item)))
                for one in self._hook_dicts.get(id(item), [item]):
                    self.copies.fill(one, self.copies.memo[id(one)][1])
            self._put_methods()
            self._put_lists()
        hooks = (tuple(self.copies.memo[key][0]) for key in self._hook_dicts)
        self._hooks = list(filter(None, hooks))
        self._stand_in()
        self._watch = Watch(self.copies.originals.values(), [slot.real for slot in self.slots if slot.real is not None])
        self.structure_token = token

    def _build(self) -> None:
        """Twins of all modules that there are now; those of modules that stay are the same as before."""
        named = self._named()
        self.copies = copies = Copies(last=self.copies)
        self._structure, self._hook_dicts = set(), {}
        for _, module in named:
            copies.note(module, copies.before(module))
            held = held_by(module)
            for name in (*PARTS, *HOOKS):
                if name in held and copies.known(held[name]) is None:
                    copies.note(held[name], copies.before(held[name]))
            self._structure |= {id(held[name]) for name in PARTS}
            hooks = [held[name] for name in HOOKS if name in held]
            self._hook_dicts |= {id(hooked): hooks for hooked in hooks}
        for _, module in named:  # now that it is known of all where they lead
            held = held_by(module)
            for original in (module, module._modules, *(held[name] for name in HOOKS if name in held)):
                copies.fill(original, self.copies.memo[id(original)][1])
        copies.last = {}
        self._beside = Copies(copies)
        self._methods = {key: kept for key, kept in self._methods.items() if key[0] in copies.originals}
        self._put_methods()
        self._put_lists()
        self._list(named)

    def _list(self, named: list[tuple[str, nn.Module]]) -> None:
        """Every slot of the modules, once per module."""
        before = {(id(slot.tensors), slot.key, slot.path): slot for slot in self.slots}
        every = (x for _, module in named for x in (*module._parameters.values(), *module._buffers.values()))
        meta = self.in_place_of_meta if any(x is not None and x.is_meta for x in every) else None
        self.slots = []
        for prefix, module in named:
            dicts: dict[str, dict[str, Any]] = {"parameter": module._parameters, "buffer": module._buffers}
            for kind, tensors in dicts.items():
                own = self.twin(tensors)  # type: ignore[arg-type]
                held = dict.fromkeys(tensors.keys())
                own.clear()
                own.update(held)
                for key, real in tensors.items():
                    path = f"{prefix}.{key}" if prefix else key
                    here = meta or (real.device if real is not None else torch.device("cpu"))
                    device = self.first_devices.setdefault(path, here)
                    known = before.get((id(tensors), key, path))
                    self.slots.append(known or Slot(tensors, key, path, kind, device, own))
        self.buffers = [slot for slot in self.slots if slot.kind == "buffer"]

    def _stand_in(self) -> None:
        """Stand-ins that say what the real tensors say now: a parameter may have been frozen, replaced or cast."""
        twins: dict[int, Tensor] = {}
        stale: list[Slot] = []
        for slot in self.slots:
            real, twin = slot.tensors[slot.key], slot.twin
            if real is slot.real and (
                real is None or same(real, twin) or (self.frozen_later and was_trained(real, twin))
            ):
                if real is not None and twin is not None:
                    twins[id(real)] = twin
            else:
                stale.append(slot)
        self.version += any(slot.real is not slot.tensors[slot.key] for slot in stale)
        for slot in stale:
            slot.real = real = slot.tensors[slot.key]
            if real is not None and nn.parameter.is_lazy(real):
                slot.real = None
                raise CaptureError(
                    f"{slot.path} has no shape yet, for its layer learns it from the first batch; "
                    "run the model once before: model(x)"
                )
            if real is not None and id(real) not in twins:
                twins[id(real)] = self.stand_in(slot, real)
            slot.twin = None if real is None else twins[id(real)]
        beside = tuple(f"{prefix}." for prefix in self.roots if prefix)
        devices = {
            slot.device
            for slot in self.slots
            if slot.real is not None and slot.real.dim() > 0 and not slot.path.startswith(beside)
        }
        self.device = devices.pop() if len(devices) == 1 else None
        self.slot_by_id = {id(x): slot for slot in self.slots for x in (slot.real, slot.twin) if x is not None}
        self.reset()

    # What capture changes --------------------------------------------------------------------------------------------

    def put_method(self, twin: nn.Module, function: Callable[..., Any] | None, name: str = "forward") -> None:
        """Let another function stand in for a method of a twin; None: its own again."""
        if function is not None:
            self._methods[id(twin), name] = twin, function
            vars(twin)[name] = function
        elif self._methods.pop((id(twin), name), None) is not None:
            vars(twin).pop(name)
            own = vars(self.original(twin))
            if name in own:
                vars(twin)[name] = self.copies.of(own[name])

    def _put_methods(self) -> None:
        for (_, name), (twin, function) in self._methods.items():
            vars(twin)[name] = function

    def _put_lists(self) -> None:
        for _, twin in self.named():
            for name in LOOKING:
                for key, hook in vars(twin)[name].items():
                    vars(twin)[name][key] = self._lists.hook(hook)

    def rebound(self, past: Iterable[nn.Module] = ()) -> dict[int, Slot]:
        """Slots whose twin holds something else than the stand-in, by the id of that. Raises CaptureError where nothing
        else may be, also in modules that forward reached `past` their twins."""
        found: dict[int, Slot] = {}
        held = {id(tensors) for module in past for tensors in (module._parameters, module._buffers)}
        for slot in self.slots:
            if id(slot.tensors) in held and slot.tensors[slot.key] is not slot.real:
                slot.tensors[slot.key] = slot.real
                raise CaptureError(
                    f"{slot.path} is set to another tensor by code that reaches its module by a global variable; pass "
                    "the module, or let a closure hold it"
                )
            new = slot.own.get(slot.key)
            if new is not slot.twin:
                if slot.kind == "parameter" or new is None:
                    keep = f"set it to a tensor, such as torch.zeros_like(self.{slot.key})"
                    raise CaptureError(
                        f"forward sets {slot.path} ({slot.kind}) to {'None' if new is None else 'another tensor'}; "
                        + (SET_NO_PARAMETER if slot.kind == "parameter" else keep)
                    )
                found[id(new)] = slot
        for path, twin in self.named():
            own = held_by(self.original(twin))
            for name in PARTS:
                added = [key for key in vars(twin)[name] if key not in own[name]]
                if added:
                    raise CaptureError(
                        f"forward adds {path + '.' if path else ''}{added[0]}; make it in __init__, or run the model "
                        "once before: model(x)"
                    )
        return found

    def reset(self, slots: Iterable[Slot] | None = None) -> None:
        """Give twins their stand-ins back; all, unless some are named."""
        if slots is None:
            self._lists.clear()
            slots = self.slots
            for slot in slots:
                for key in slot.own.keys() - slot.tensors.keys():
                    del slot.own[key]
        for slot in slots:
            slot.own[slot.key] = slot.twin

    def give_back(self, holder: Any, name: str, real: Swap, memo: Memo) -> None:
        """Set an attribute of the user's object to what forward has set it to on the twin, with the real tensors, and
        the objects in `memo`."""
        own, original = vars(holder), self.original(holder)
        if name in own:
            own[name] = value = change(own[name], real, memo=memo)
            if original is not holder:
                vars(original)[name] = value = Originals(self._beside).of(value)
                self._watch.keep(original, name, value)
        elif original is not holder:
            vars(original).pop(name, None)

    def give_back_hooks(self) -> None:
        """Hang hooks that hang on twins only on the modules themselves."""
        for _, twin in self.named():
            own, original = vars(twin), vars(self.original(twin))
            for name in HOOKS:
                new = [key for key in own.get(name, ()) if key not in original[name]]
                original[name].update({key: Originals(self.copies).of(own[name][key]) for key in new})

    def give_back_buffers(self, slots: Iterable[Slot], real: Swap) -> None:
        """The same of buffers that forward has set to tensors of another shape."""
        for slot in slots:
            new = slot.own.get(slot.key)
            if new is not slot.twin and isinstance(new, Tensor):
                slot.tensors[slot.key] = real(slot.path, new)

    def give_back_lists(self, real: Swap) -> None:
        """Append to the user's lists what hooks have appended in this call."""
        self._lists.give_back(real)


def held_by(module: nn.Module) -> Mapping[str, Any]:
    """The attributes of a module; of a script module those that it has as a module."""
    if isinstance(module, torch.jit.ScriptModule):
        return {name: getattr(module, name) for name in NAMES if hasattr(module, name)}
    return vars(module)


def was_trained(real: Tensor, twin: Tensor | None) -> bool:
    """Whether the two differ in one thing: the real tensor needs no gradient, and the stand-in does."""
    return twin is not None and FACTS(real) == (False, *FACTS(twin)[1:]) and twin.requires_grad


def same(real: Tensor, twin: Tensor | None) -> bool:
    """Whether the stand-in still says what the real tensor says."""
    return twin is not None and FACTS(real) == FACTS(twin)
