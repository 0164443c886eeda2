"""What fxpipe raises. Every message says what is wrong with the value shown, where, and what to write instead."""


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


class CompileError(FxpipeError):
    """A stage cannot be compiled by the backend that was asked for."""


class MaterializeError(FxpipeError):
    """A tensor on the meta device cannot be given values: nothing in the model says which."""


class CheckpointError(FxpipeError):
    """A checkpoint is none, is damaged, or does not fit the model."""


class RankError(FxpipeError):
    """Another rank has failed, is gone, or has another model or plan: the message says which, and what happened."""
