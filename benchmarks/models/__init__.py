"""The models on which the papers measured, written as anyone would write them: plain modules, plain skips."""

from .alexnet import AlexNet
from .amoebanet import AmoebaNetD
from .inception import InceptionV3
from .recurrent import NMT, RNNLM, RNNTC
from .resnet import ResNet, resnet101
from .unet import UNet

__all__ = ["NMT", "RNNLM", "RNNTC", "AlexNet", "AmoebaNetD", "InceptionV3", "ResNet", "UNet", "resnet101"]
