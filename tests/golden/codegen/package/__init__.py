"""Net as a pipeline of 2 stages, for training.

fxpipe wrote these files; they are plain Python, to be read and edited.

    model = Net(...)
    pipe = fxpipe.load(folder, model)  # the stages hold the model's own parameters
    result = pipe(x)
"""

from .scheduler import Scheduler
from .stage0 import Stage0
from .stage1 import Stage1

__all__ = [
    "CHUNKS",
    "FORMAT",
    "INPUTS",
    "MODEL",
    "STAGES",
    "TENSORS",
    "TRAINING",
    "Scheduler",
    "inputs",
    "result",
]

FORMAT = 5
MODEL = "Net"
TRAINING = True
CHUNKS = 4
STAGES = (Stage0, Stage1)

# The model's tensors that the stages hold: key, shape, type.
TENSORS = (
    ("layers.0.weight", (4, 4), "float32"),
    ("layers.0.bias", (4,), "float32"),
    ("layers.1.weight", (4, 4), "float32"),
    ("layers.1.bias", (4,), "float32"),
    ("offset", (4,), "float32"),
)

# What a call brings: name, shape (b is the batch), type.
INPUTS = (("x", ("b", 4), "float32"),)


def inputs(x):
    """The inputs in the order of the scheduler's, from a call of the model."""
    return (x,)


def result(add):
    """What the model returns, from the scheduler's outputs."""
    return add
