"""The models on which the papers measured, written as anyone would write them: plain modules, plain skips."""

from .alexnet import AlexNet
from .amoebanet import AmoebaNetD
from .inception import InceptionV3
from .llama import LLAMA_7B, LLAMA_70B, Llama
from .recurrent import NMT, RNNLM, RNNTC
from .resnet import ResNet, resnet101
from .unet import UNet

__all__ = [
    "LLAMA_7B",
    "LLAMA_70B",
    "NMT",
    "RNNLM",
    "RNNTC",
    "AlexNet",
    "AmoebaNetD",
    "InceptionV3",
    "Llama",
    "ResNet",
    "UNet",
    "resnet101",
]
