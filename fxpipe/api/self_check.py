"""On a torch that has not been tested: whether the main ways of running a small model give the plain model's results.

The first pipe of a process asks, and a file remembers that all was right, for this torch, fxpipe and Python. What is
wrong is an error that names it; what is right is said in one line.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxpipe.errors import FxpipeError, warn
from fxpipe.runtime.random import fork_rng
from fxpipe.torch_internals.capability import HIGHEST, TESTED

WAYS: dict[str, dict[str, Any]] = {
    "a step with 1F1B": {"schedule": "1f1b", "checkpoint": "never"},
    "a zero-bubble schedule": {"schedule": "zb-h1", "checkpoint": "never"},
    "recomputation": {"schedule": "gpipe", "checkpoint": "always"},
    "generated backward": {"schedule": "zb-h1", "checkpoint": "never", "backward": "code"},
}
Compile = Callable[..., Any]

_asked: set[str] = set()  # versions of torch that this process has asked about


def is_untested() -> bool:
    """Whether torch is newer than what has been tested."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) > HIGHEST


def check_once(compile: Compile) -> None:
    """Where torch has not been tested, run a small model in each way, unless that was right before. `compile`:
    fxpipe.compile. Raises FxpipeError with what is wrong."""
    if torch.__version__ in _asked or not is_untested():
        return
    _asked.add(torch.__version__)
    file = passed_marker_path()
    if file.exists():
        return
    for way, wrong in attempts(compile):
        if wrong:
            _asked.discard(torch.__version__)
            raise FxpipeError(
                f"PyTorch {torch.__version__} has not been tested, and with it {way} of a small model is not right: "
                f"{wrong}; install a version that has been tested, {TESTED}"
            )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError:  # the next process asks again
        pass
    warn(
        f"PyTorch {torch.__version__} has not been tested with fxpipe ({TESTED} have); a small model is right in "
        f"{len(WAYS)} ways, and pipe.verify says whether yours is"
    )


def attempts(compile: Compile) -> Iterator[tuple[str, str]]:
    """Each way, and what is wrong with it: "" if it has the plain model's results."""
    for way, options in WAYS.items():
        yield way, attempt(compile, options)


def attempt(compile: Compile, options: dict[str, Any]) -> str:
    """What is wrong with a call and a step of a small model with these options; "" if nothing is."""
    with fork_rng(), torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        x = torch.linspace(-1, 1, 16 * 32).sin().view(16, 32)
        pipe = compile(small_model(), ["cpu", "cpu"], 4, **options)
        try:
            report = pipe.verify(x, target=torch.zeros(16, 8), loss_fn=nn.MSELoss())
            return "" if report.ok else str(report)
        except Exception as error:  # whatever torch raises, the way is not right
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        finally:
            pipe.close()


def small_model() -> nn.Sequential:
    with fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(32, 64),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(64, 64),
            nn.LayerNorm(64),
            nn.ReLU(),
            nn.Linear(64, 8),
        )


def passed_marker_path() -> Path:
    """The file that is there if all was right for this torch, fxpipe and Python."""
    own = (torch.__version__, torch.version.git_version, torch.__file__, version("fxpipe"), sys.version)
    name = hashlib.sha256("\n".join(map(str, own)).encode()).hexdigest()[:16]
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fxpipe" / f"torch-is-right-{name}"
