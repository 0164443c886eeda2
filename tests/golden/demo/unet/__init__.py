"""UNet as a pipeline of 4 stages, for training.

fxpipe wrote these files; they are plain Python, to be read and edited.

    model = UNet(...)
    pipe = fxpipe.load(folder, model)  # the stages hold the model's own parameters
    result = pipe(image)
"""

from .scheduler import Scheduler
from .stage0 import Stage0
from .stage1 import Stage1
from .stage2 import Stage2
from .stage3 import Stage3

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
MODEL = "UNet"
TRAINING = True
CHUNKS = 8
STAGES = (Stage0, Stage1, Stage2, Stage3)

# The model's tensors that the stages hold: key, shape, type.
TENSORS = (
    ("down1.conv1.weight", (16, 1, 3, 3), "float32"),
    ("down1.norm.weight", (16,), "float32"),
    ("down1.norm.bias", (16,), "float32"),
    ("down1.conv2.weight", (16, 16, 3, 3), "float32"),
    ("down1.conv2.bias", (16,), "float32"),
    ("down2.conv1.weight", (32, 16, 3, 3), "float32"),
    ("down2.norm.weight", (32,), "float32"),
    ("down2.norm.bias", (32,), "float32"),
    ("down2.conv2.weight", (32, 32, 3, 3), "float32"),
    ("down2.conv2.bias", (32,), "float32"),
    ("down3.conv1.weight", (64, 32, 3, 3), "float32"),
    ("down3.norm.weight", (64,), "float32"),
    ("down3.norm.bias", (64,), "float32"),
    ("down3.conv2.weight", (64, 64, 3, 3), "float32"),
    ("down3.conv2.bias", (64,), "float32"),
    ("middle.conv1.weight", (64, 64, 3, 3), "float32"),
    ("middle.norm.weight", (64,), "float32"),
    ("middle.norm.bias", (64,), "float32"),
    ("middle.conv2.weight", (64, 64, 3, 3), "float32"),
    ("middle.conv2.bias", (64,), "float32"),
    ("up3.conv1.weight", (32, 128, 3, 3), "float32"),
    ("up3.norm.weight", (32,), "float32"),
    ("up3.norm.bias", (32,), "float32"),
    ("up3.conv2.weight", (32, 32, 3, 3), "float32"),
    ("up3.conv2.bias", (32,), "float32"),
    ("up2.conv1.weight", (16, 64, 3, 3), "float32"),
    ("up2.norm.weight", (16,), "float32"),
    ("up2.norm.bias", (16,), "float32"),
    ("up2.conv2.weight", (16, 16, 3, 3), "float32"),
    ("up2.conv2.bias", (16,), "float32"),
    ("up1.conv1.weight", (16, 32, 3, 3), "float32"),
    ("up1.norm.weight", (16,), "float32"),
    ("up1.norm.bias", (16,), "float32"),
    ("up1.conv2.weight", (16, 16, 3, 3), "float32"),
    ("up1.conv2.bias", (16,), "float32"),
    ("head.weight", (1, 16, 1, 1), "float32"),
    ("head.bias", (1,), "float32"),
)

# What a call brings: name, shape (b is the batch), type.
INPUTS = (("image", ("b", 1, 16, 16), "float32"),)


def inputs(image):
    """The inputs in the order of the scheduler's, from a call of the model."""
    return (image,)


def result(sub):
    """What the model returns, from the scheduler's outputs."""
    return sub
