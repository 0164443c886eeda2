"""What fxpipe raises. Every message says what is wrong with the value shown, where, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FxpipeError(Exception):
    """The base of all errors of fxpipe."""


class CaptureError(FxpipeError):
    """The model cannot be captured: the message names the user's line and what to write instead."""


class PlanError(FxpipeError, ValueError):
    """The balance, split points or plan asked for cannot be had for this model."""


class InputError(FxpipeError, ValueError):
    """The arguments of a call cannot be cut into micro-batches, or do not fit what was compiled."""


class PackageError(FxpipeError):
    """A saved package does not fit the model, or is damaged."""


class MixedSamplesWarning(UserWarning):
    """The model mixes the samples of a batch, and each micro-batch has only its own: what is returned is what the plain
    model returns for each micro-batch by itself. The message names the line, and says what to write."""


class BatchStatisticsWarning(UserWarning):
    """BatchNorm in training uses the mean and variance of each micro-batch, not those of the batch. The message names
    the norms, what `deferred_batch_norm=True` changes and what it does not, and how to switch the warning off."""


class CompileError(FxpipeError):
    """A stage cannot be compiled by the backend that was asked for."""


class MaterializeError(FxpipeError):
    """A tensor on the meta device cannot be given values: nothing in the model says which."""


class CheckpointError(FxpipeError):
    """A checkpoint is none, is damaged, or does not fit the model."""


class RankError(FxpipeError):
    """Another rank has failed, is gone, or has another model or plan: the message says which, and what happened."""


def nearest(word: object, known: Iterable[str]) -> str | None:
    """The one of the known words that is most like this one; None if none is.

    >>> nearest("1F1B", ["gpipe", "1f1b"]), nearest("x", ["gpipe", "1f1b"])
    ('1f1b', None)
    """
    by_lower = {name.lower(): name for name in known}
    found = get_close_matches(str(word).lower(), by_lower, 1, 0.5)
    return by_lower[found[0]] if found else None


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The end of an error about a word that is not known: a question, or nothing."""
    near = nearest(word, known)
    return "" if near is None else f"; did you mean {near!r}?"
