"""What a model does once and for all in its first call, done before it is traced.

Some libraries put off to the first call what belongs into `__init__`: they take a lock, hang hooks on the modules whose
outputs they collect, and note in a flag that this is done. That is no arithmetic, and Dynamo cannot trace it. So where
it stumbles over a lock, forward runs once as plain Python on fake tensors, which compute nothing, and the hooks and new
flags stay.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from .arguments import Call
from .hollow import SLOTS, Snapshot, Twins
from .nest import change

SIGNS = ("`lock` context manager", "`RLock` context manager")  # in errors that a first call may be to blame for


def warm(twins: Twins, call: Call, beside: tuple[Any, ...] = ()) -> None:
    """Run forward on fake tensors. Hooks stay, and so do attributes that were set to a truth and are new; all else is
    as it was, with the real tensors in their places."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, Tensor] = {}

    def fake(path: str, tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            fakes[id(tensor)] = mode.from_tensor(tensor)
        return fakes[id(tensor)]

    modules = [module for _, module in twins.named()]
    before = Snapshot((*modules, *beside))
    tensors: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (held, dict(held)) for module in modules for held in (vars(module)[slot] for slot in SLOTS)
    ]
    args, kwargs = (change(part, fake) for part in (call.args, call.kwargs))
    for slot in twins.slots:
        slot.tensors[slot.key] = None if slot.twin is None else fake(slot.path, slot.twin)
    try:
        with mode, torch.inference_mode(False), contextlib.suppress(Exception):  # what fails, fails again when traced
            twins.roots[""](*args, **kwargs)
    finally:
        for held, kept in tensors:
            held.clear()
            held.update(kept)
        twins.leave()
        for (_, name), changed in before.restore().items():
            if name not in vars(changed.holder) and type(changed.value) is bool:
                vars(changed.holder)[name] = changed.value
