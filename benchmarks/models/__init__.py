"""The models on which the pipeline papers measured, written as anyone would write them: plain modules, plain skips."""

from .amoebanet import AmoebaNetD
from .resnet import ResNet, resnet101
from .unet import UNet

__all__ = ["AmoebaNetD", "ResNet", "UNet", "resnet101"]
