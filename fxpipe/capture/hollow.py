"""Stand-ins without memory: how a model is traced without being run.

torch's fake tensors would do, if it were not for guards: Dynamo looks at the real arguments of every call to decide
whether what it captured still holds. So during a call the model's dicts of parameters and buffers hold *hollow* tensors
of the same size, strides, dtype and device, whose storage has been resized to nothing. Dynamo cannot tell; nothing of
the model's arithmetic can run; and the real tensors may meanwhile be anywhere, on other devices too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import CaptureError

from .nest import ATOMS


def hollow(real: Tensor, device: torch.device | None = None, batch: tuple[int, int] | None = None) -> Tensor:
    """A tensor like `real` without memory, on `device`; `batch` is (dimension, size): that dimension has that size.

    >>> twin = hollow(torch.ones(2, 3))
    >>> twin.shape, twin.untyped_storage().nbytes()
    (torch.Size([2, 3]), 0)
    """
    size, stride = list(real.shape), list(real.stride())
    if batch is not None and size[batch[0]] != batch[1]:
        dim, rows = batch
        # Strides of slower dimensions grow with the batch, so that a transposed batch stays dense.
        stride = [-(-s * rows // size[dim]) if s > stride[dim] > 0 else s for s in stride]
        size[dim] = rows
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty_strided(size, stride, dtype=real.dtype, device=device or real.device)
        if made.dim() == 0:
            made.zero_()  # Dynamo remembers the item of a 0-dim tensor, so this one has memory
        elif made.device.type != "meta":
            made.untyped_storage().resize_(0)
        if isinstance(real, nn.Parameter):
            return nn.Parameter(made, requires_grad=real.requires_grad)
        return made.requires_grad_(real.requires_grad)


def dense(real: Tensor) -> Tensor:
    """The tensor itself if its elements lie without gaps, in any order of dimensions; else a copy without gaps.
    They, as in `x[:, :-1]`, would become numbers in the graph that depend on how the caller made the tensor.

    >>> whole = torch.ones(2, 3)
    >>> dense(whole.t()).stride(), dense(whole[:, :2]).stride()
    ((1, 3), (2, 1))
    """
    if real.layout is not torch.strided or real.is_contiguous():
        return real
    length = 1
    for stride, size in sorted(zip(real.stride(), real.shape, strict=True)):
        if stride == 0 or size == 1:  # an expanded dimension has no elements of its own
            continue
        if stride != length:
            return real.contiguous()
        length *= size
    return real


SLOTS = ("_parameters", "_buffers", "_modules")  # what hangs there is looked at in other ways
DEPTH = 3  # how far from a module an object may be that forward is expected to change
MOST_ITEMS = 1000  # longer lists hold data, not parts of the model


@dataclass(frozen=True)
class Change:
    """What an attribute of `holder` was set to."""

    holder: Any
    value: Any


Changes = dict[tuple[int, str], Change]  # by the id of the holder and the attribute
Roots = Mapping[str, nn.Module]  # by what the paths of their tensors begin with: "" for the model


@dataclass
class Slot:
    """A parameter or buffer of the model: where it hangs, the real tensor there, and its stand-in."""

    tensors: dict[str, Tensor | None]
    key: str
    path: str
    kind: str
    device: torch.device
    real: Tensor | None = None
    twin: Tensor | None = None


@dataclass
class Twins:
    """The stand-ins of the parameters and buffers of modules: of the model, and of what computes its loss. `roots` says
    what the paths of each module's tensors begin with; what hangs in two of them belongs to the first.

    They stay on the devices where the model was at first, whatever becomes of the real tensors, and all on the meta
    device if a part of the model was there; `device` is that of all of them, if they share one. `version` counts how
    often other tensors than before were found in the model.
    """

    roots: Roots
    slots: list[Slot] = field(default_factory=list)
    modules: list[dict[str, nn.Module | None]] = field(default_factory=list)
    shape: list[list[nn.Module | None]] = field(default_factory=list)
    device: torch.device | None = None
    of: dict[int, Slot] = field(default_factory=dict)  # by the id of the stand-in
    version: int = 0

    def __post_init__(self) -> None:
        self._list()

    def watch(self, roots: Roots) -> None:
        """Take these modules instead."""
        if list(map(id, roots.values())) != list(map(id, self.roots.values())) or list(roots) != list(self.roots):
            self.roots = roots
            self._list()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The real tensors, by path."""
        return {slot.path: slot.real for slot in self.slots if slot.real is not None}

    def named(self) -> list[tuple[str, nn.Module]]:
        """All modules, each under its first path."""
        seen: set[nn.Module] = set()
        return [pair for prefix, root in self.roots.items() for pair in root.named_modules(seen, prefix)]

    def _list(self) -> None:
        """Every slot of the model, once per module; called again when modules or slots come or go."""
        devices = {slot.path: slot.device for slot in self.slots}
        before = {(id(slot.tensors), slot.key, slot.path): slot for slot in self.slots}
        named = self.named()
        every = (x for _, module in named for x in (*module._parameters.values(), *module._buffers.values()))
        meta = torch.device("meta") if any(x is not None and x.is_meta for x in every) else None
        self.modules = [module._modules for _, module in named]
        self.shape = [list(children.values()) for children in self.modules]
        self.slots = []
        for prefix, module in named:
            dicts: dict[str, dict[str, Any]] = {"parameter": module._parameters, "buffer": module._buffers}
            for kind, tensors in dicts.items():
                for key, real in tensors.items():
                    path = f"{prefix}.{key}" if prefix else key
                    device = devices.get(path) or meta or (real.device if real is not None else torch.device("cpu"))
                    known = before.get((id(tensors), key, path))
                    self.slots.append(known or Slot(tensors, key, path, kind, device))
        self.of = {id(slot.twin): slot for slot in self.slots if slot.twin is not None}
        self.dicts = [d for _, module in named for d in (module._parameters, module._buffers)]
        self.hook_dicts = [
            hooks
            for _, module in named
            for hooks in (
                module._forward_pre_hooks,
                module._forward_hooks,
                module._backward_pre_hooks,
                module._backward_hooks,
            )
        ]

    def hooks(self) -> list[tuple[int, ...]]:
        """The numbers of all hooks on the model's modules; torch gives none twice."""
        return [tuple(hooks) for hooks in self.hook_dicts if hooks]

    def sync(self) -> None:
        """Make the stand-ins say what the real tensors say now: a parameter may have been frozen, replaced or cast."""
        if sum(map(len, self.dicts)) != len(self.slots) or any(
            list(now.values()) != was for now, was in zip(self.modules, self.shape, strict=True)
        ):
            self._list()
        twins: dict[int, Tensor] = {}
        stale: list[Slot] = []
        for slot in self.slots:
            real, twin = slot.tensors[slot.key], slot.twin
            if real is slot.real and (real is None or same(real, twin)):
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
            if real is None or real.device.type == "meta":
                slot.twin = real
            else:
                if id(real) not in twins:
                    twins[id(real)] = hollow(real, slot.device)
                slot.twin = twins[id(real)]
        if stale:
            beside = tuple(f"{prefix}." for prefix in self.roots if prefix)
            devices = {
                slot.device
                for slot in self.slots
                if slot.real is not None and slot.real.dim() > 0 and not slot.path.startswith(beside)
            }
            self.device = devices.pop() if len(devices) == 1 else None
            self.of = {id(slot.twin): slot for slot in self.slots if slot.twin is not None}

    def enter(self) -> None:
        """Put the stand-ins into the model."""
        for slot in self.slots:
            slot.tensors[slot.key] = slot.twin

    def leave(self) -> None:
        """Put the real tensors back."""
        for slot in self.slots:
            slot.tensors[slot.key] = slot.real

    def rebound(self) -> dict[int, Slot]:
        """Slots that hold something else than their stand-in since `enter`, by the id of what they hold."""
        found: dict[int, Slot] = {}
        for slot in self.slots:
            new = slot.tensors.get(slot.key)
            if new is not slot.twin:
                if slot.kind == "parameter" or slot.twin is None or new is None:
                    raise CaptureError(
                        f"forward sets {slot.path} ({slot.kind}) to {'None' if new is None else 'another tensor'}; "
                        f"give it its shape in __init__, as a buffer: self.register_buffer({slot.key!r}, ...)"
                    )
                found[id(new)] = slot
        return found


def same(real: Tensor, twin: Tensor | None) -> bool:
    """Whether the stand-in still says what the real tensor says."""
    return (
        twin is not None
        and real.requires_grad == twin.requires_grad
        and real.dtype == twin.dtype
        and real.shape == twin.shape
    )


class Snapshot:
    """The Python attributes of modules and other objects as they are now, and of the plain objects that hang on them,
    such as a configuration; with the contents of lists, dicts and sets."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self.kept = [(holder, dict(vars(holder)), _contents(holder)) for holder in holders(objects)]

    def restore(self) -> Changes:
        """Put everything back; gives what was there instead."""
        changes: Changes = {}
        for holder, attributes, contents in self.kept:
            now = vars(holder)
            for name in list(attributes.keys() | now.keys()):
                if name not in attributes:
                    changes[id(holder), name] = Change(holder, now.pop(name))
                elif name not in now or now[name] is not attributes[name]:
                    changes[id(holder), name] = Change(holder, now.get(name))
                    now[name] = attributes[name]
            for name, (container, kept) in contents.items():
                if not _identical(container, kept):
                    changes[id(holder), name] = Change(holder, container.copy())
                    _refill(container, kept)
        return changes


def holders(objects: Iterable[Any]) -> list[Any]:
    """The objects, and those with attributes that they hold, directly or in others."""
    found: dict[int, Any] = {id(holder): holder for holder in objects}
    level = list(found.values())
    for _ in range(DEPTH):
        held = [value for holder in level for value in _held(holder) if has_attributes(value)]
        level = [value for key, value in {id(value): value for value in held}.items() if key not in found]
        found |= {id(value): value for value in level}
    return list(found.values())


def _held(holder: Any) -> Iterator[Any]:
    for name, value in vars(holder).items():
        if name in SLOTS or type(value) in ATOMS:
            continue
        if type(value) in (list, tuple, dict) and len(value) <= MOST_ITEMS:
            yield from value.values() if type(value) is dict else value
        else:
            yield value


def has_attributes(value: Any) -> bool:
    if type(value) in ATOMS or isinstance(value, (Tensor, nn.Module, type)):
        return False
    return type(getattr(value, "__dict__", None)) is dict


def _identical(left: Any, right: Any) -> bool:
    """Whether two lists, dicts or sets hold the very same objects."""
    pairs = ((c.keys(), c.values()) if isinstance(c, dict) else (c, ()) for c in (left, right))
    (a, b), (c, d) = ((list(x), list(y)) for x, y in pairs)
    return list(map(id, a)) == list(map(id, c)) and list(map(id, b)) == list(map(id, d))


def _refill(container: Any, kept: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(kept)


def _contents(holder: Any) -> dict[str, tuple[Any, Any]]:
    """The holder's own lists, dicts and sets, each with a copy."""
    own = {name: value for name, value in vars(holder).items() if name not in SLOTS}
    return {name: (value, value.copy()) for name, value in own.items() if type(value) in (list, dict, set)}
