"""The one-time setup of a model's first call, done before the model is traced.

Some libraries do in the first call what belongs into `__init__`: they take a lock, register hooks on the modules whose
outputs they collect, and set a flag. Dynamo cannot trace that. So if Dynamo stops at a lock, forward runs once as plain
Python on fake tensors, which compute nothing. The hooks and new flags stay, also on the model itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

import torch
from torch import Tensor

from fxpipe.capture.call_arguments import Call
from fxpipe.capture.nested_values import change
from fxpipe.capture.twins.attribute_changes import Snapshot
from fxpipe.capture.twins.twin import Slot, Twins, hollow_one
from fxpipe.torch_internals.tracing.patched import quiet
from fxpipe.torch_internals.tracing.tensors_without_memory import FakeTensorMode

from .calls_around import put
from .opaque_submodules import Piece

SIGNS = ("`lock` context manager", "`RLock` context manager")  # in errors that a first call may be to blame for


def warm(twins: Twins, call: Call, pieces: Collection[Piece] = ()) -> None:
    """Run forward on fake tensors, with stand-ins for submodules that are kept whole. The model gets the hooks and new
    bool attributes that forward sets."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor, lest another gets its id

    def fake(path: str, tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            fakes[id(tensor)] = tensor, mode.from_tensor(tensor)
        return fakes[id(tensor)][1]

    def stand_in(slot: Slot, real: Tensor) -> Tensor:
        return fake(slot.path, hollow_one(slot, real))

    running = twins.with_stand_ins(stand_in)
    args, kwargs = (change(part, fake) for part in (call.args, call.kwargs))
    put(running, ((running.twin(piece.opaque.module), piece.called, piece.forward) for piece in pieces))
    asked = [piece.asked for piece in pieces]
    before = Snapshot([module for _, module in running.named()])
    with mode, torch.inference_mode(False), quiet("torch._subclasses.fake_tensor"):
        with contextlib.suppress(Exception):  # what fails, fails again when traced
            running.root(*args, **kwargs)
    call.objects.restore()
    for piece, before_run in zip(pieces, asked, strict=True):
        piece.asked = before_run
    running.give_back_hooks()
    for (_, name), changed in before.restore().items():
        original = running.original(changed.holder)
        if name not in vars(original) and type(changed.value) is bool:
            vars(original)[name] = changed.value
    twins.sync()
