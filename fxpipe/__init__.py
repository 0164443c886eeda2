"""fxpipe: compiles any PyTorch model into a readable pipeline.

    fxpipe.compile(model, devices, chunks)      a pipe: the model in stages, called like it; pipe.step(...) trains it
    fxpipe.load(folder, model)                  the pipe that pipe.save(folder) wrote, with your changes
    fxpipe.plan(model, cluster, batch_size)     the fastest stages for a cluster, and a proof of how near they are
    fxpipe.search(model, cluster, batch_size)   how to cut and place each operator
    fxpipe.profile(model, inputs)               what each op costs
    fxpipe.save_checkpoint, fxpipe.load_checkpoint, fxpipe.clip_grad_norm_, fxpipe.GradScaler     training over ranks

`help(fxpipe.compile)` tells all options; `fxpipe --help` in a shell, the commands. The pages begin at docs/start.md.

The tour, which runs:

>>> import torch, fxpipe
>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
>>> pipe = fxpipe.compile(model, devices=2, chunks=4, example_inputs=(torch.zeros(8, 8),))

It is called like the model, and has the model's own gradients:

>>> x = torch.randn(8, 8)
>>> pipe(x).sum().backward()
>>> gradient = model[0].weight.grad.clone()
>>> model.zero_grad()
>>> model(x).sum().backward()
>>> torch.allclose(gradient, model[0].weight.grad, atol=1e-6)
True

What runs can be read. F2 is the forward of micro-batch 2, B2 its backward; a clock is the time of one of them:

>>> print(pipe.schedule)
gpipe: 2 stages, 4 micro-batches
clock      0   1   2   3   4   5   6   7   8   9
device 0  F0  F1  F2  F3          B3  B2  B1  B0
device 1      F0  F1  F2  F3  B3  B2  B1  B0

Forward and backward in one go, in the order of any schedule:

>>> early = fxpipe.compile(model, devices=2, chunks=4, schedule="1f1b")
>>> model.zero_grad()
>>> loss = early.step(x, target=torch.zeros(8, 4), loss_fn=nn.functional.mse_loss)
>>> print(early.schedule)
1f1b: 2 stages, 4 micro-batches
clock      0   1   2   3   4   5   6   7   8   9
device 0  F0  F1      B0  F2  B1  F3  B2      B3
device 1      F0  B0  F1  B1  F2  B2  F3  B3
>>> pipe.close(), early.close()
(None, None)
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpipe.pipe.verify.versions import version_of

from .errors import (
    BatchStatisticsWarning,
    CaptureError,
    CheckpointError,
    CompileError,
    FxpipeError,
    InputError,
    MaterializeError,
    MixedSamplesWarning,
    PackageError,
    PlanError,
    RankError,
    ReleasedError,
    UnfinishedSearchWarning,
)

if TYPE_CHECKING:
    from fxpipe.api.public_names import *
    from fxpipe.training.checkpoint import async_save_checkpoint, last_checkpoint, load_checkpoint, save_checkpoint
    from fxpipe.training.gradients import GradScaler, clip_grad_norm_

__version__ = version_of("fxpipe")

__all__ = [
    "BatchStatisticsWarning",
    "CaptureError",
    "Chain",
    "CheckpointError",
    "Cluster",
    "CompileError",
    "Device",
    "FxpipeError",
    "GradScaler",
    "InputError",
    "Layer",
    "Link",
    "MaterializeError",
    "MatrixSpeed",
    "MixedSamplesWarning",
    "PackageError",
    "Pipe",
    "Plan",
    "PlanError",
    "Planned",
    "Profile",
    "RankError",
    "ReleasedError",
    "Schedule",
    "Searched",
    "Switch",
    "Timeline",
    "UnfinishedSearchWarning",
    "__version__",
    "async_save_checkpoint",
    "backend",
    "clip_grad_norm_",
    "compile",
    "detect",
    "is_recomputing",
    "last_checkpoint",
    "load",
    "load_checkpoint",
    "materialize",
    "plan",
    "profile",
    "rows",
    "save_checkpoint",
    "search",
]

# These are imported when they are asked for: torch's sharded tensors and distributed checkpoints take a second.
LATE = dict.fromkeys(("GradScaler", "clip_grad_norm_"), "fxpipe.training.gradients") | dict.fromkeys(
    ("async_save_checkpoint", "last_checkpoint", "load_checkpoint", "save_checkpoint"), "fxpipe.training.checkpoint"
)


def __getattr__(name: str) -> Any:
    if name in LATE:
        return getattr(import_module(LATE[name]), name)
    if not name.startswith("__"):
        _import_all()
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _import_all() -> None:
    """Import all other public names, and with them the subpackages and torch."""
    public = import_module("fxpipe.api.public_names")
    globals().update((known, value) for known, value in vars(public).items() if known in __all__)


def __dir__() -> list[str]:
    """The public names only; submodules can still be imported by name."""
    return sorted(["__doc__", "__file__", "__name__", "__path__", *__all__])


# The command imports what it needs itself: torch takes seconds, and its help does without. All others have what an
# import registers, such as the rendezvous of ranks.
if Path(sys.argv[0]).stem != "fxpipe" and sys.argv[0] != "-m":
    _import_all()
