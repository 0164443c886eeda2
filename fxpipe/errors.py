"""What fxpipe raises. Every message says what is wrong with the value shown, where, and what to write instead."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class FxpipeError(Exception):
    """The base of all errors of fxpipe."""


class CaptureError(FxpipeError):
    """The model cannot be captured: the message names the user's line and what to write instead."""


class PlanError(FxpipeError, ValueError):
    """What was asked of a function cannot be done: an option has a wrong value or contradicts another, or there is no
    such plan, schedule, strategy or cluster for this model. The message names the value and what to write instead."""


class InputError(FxpipeError, ValueError):
    """The arguments of a call cannot be cut into micro-batches, or do not fit what was compiled."""


class PackageError(FxpipeError):
    """A saved package does not fit the model, or is damaged."""


class MixedSamplesWarning(UserWarning):
    """The model mixes the samples of a batch, as `x - x.mean(0)` does, but each micro-batch has only its own samples:
    the result is that of the plain model on each micro-batch by itself. The message names the line, and says what to
    write."""


class BatchStatisticsWarning(UserWarning):
    """BatchNorm in training uses the mean and variance of each micro-batch, not those of the batch. The message names
    the norms, what `deferred_batch_norm=True` changes and what it does not, and how to switch the warning off. Or each
    micro-batch writes into other buffers, which the message names."""


class UnfinishedSearchWarning(UserWarning):
    """DAPPLE's search for a plan did not end within `time_limit`: the plan is the best that it had found by then."""


class CompileError(FxpipeError):
    """A stage cannot be compiled by the backend that was asked for."""


class MaterializeError(FxpipeError):
    """A tensor on the meta device gets no values: neither the model nor `init=` sets them. The message says how."""


class CheckpointError(FxpipeError):
    """A folder is not a checkpoint, or the checkpoint is damaged or does not fit the model."""


class ReleasedError(FxpipeError, RuntimeError):
    """What needs the values of a tensor of the model that other ranks have."""


class RankError(FxpipeError):
    """Another rank has failed, is gone, or has another model or plan: the message says which, and what happened."""


OURS = {"fxpipe", "passes", "codegen", "torch", "contextlib"}  # not the user's modules


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn, at the user's line that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        if frame.f_back is None:  # a worker thread
            level = 2
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def similar(word: object, known: Iterable[str], most: int = 3) -> list[str]:
    """The known words that are similar to `word`, ignoring case, the most similar first.

    >>> similar("1F1B", ["gpipe", "1f1b"]), similar("x", ["gpipe", "1f1b"])
    (['1f1b'], [])
    """
    by_lower = {name.lower(): name for name in known}
    return [by_lower[name] for name in get_close_matches(str(word).lower(), by_lower, most, 0.5)]


def nearest(word: object, known: Iterable[str]) -> str | None:
    """The known word that is most similar to `word`; None if none is similar."""
    return next(iter(similar(word, known, 1)), None)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The end of an error about an unknown word: "; did you mean ...?", or "" if no known word is similar."""
    near = nearest(word, known)
    return "" if near is None else f"; did you mean {near!r}?"


def of_user(function: Any) -> str:
    """A function that the user has given, as errors name it: with its file and line."""
    name, code = getattr(function, "__name__", type(function).__name__), getattr(function, "__code__", None)
    return name if code is None else f"{name} ({file_name(code.co_filename)}:{code.co_firstlineno})"


def file_name(path: str) -> str:
    """A file of the user, as messages and comments name it: without its folder; a notebook's cell as `In[3]`.

    >>> file_name("/home/me/train.py")
    'train.py'
    """
    notebook = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cell = notebook and notebook.compile.format_code_name(path)  # IPython's: ("Cell", "In[3]")
    return cell[1] if cell else os.path.basename(path)
