"""The convolutional networks of the SOAP paper as operator graphs: AlexNet, Inception-v3 and ResNet-101, and LeNet,
which has few enough strategies to try them all.

As in the paper, activations and normalisations belong to the convolution before them. Sizes default to the published
ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.ir.operators.operators import Operator, OperatorGraph

from .graph_builder import Draft
from .operator_kinds import concat, convolution, elementwise, flatten, image, linear, pooling

Kernel = int | tuple[int, int]
Layer = tuple[int, Kernel]  # channels out, and the size of the kernel
ROW, COLUMN = (1, 7), (7, 1)


def lenet(batch: int = 64, classes: int = 10) -> OperatorGraph:
    """LeNet-5 on images of 28 by 28: two convolutions, two poolings, three fully connected layers."""
    add = Draft()
    x = add(image("image", batch, 1, 28, 28))
    x = add(pooling("pool1", add(convolution("conv1", x, 6, 5, padding=2)), 2))
    x = add(pooling("pool2", add(convolution("conv2", x, 16, 5)), 2))
    x = add(flatten("flat", x))
    for name, neurons in (("fc3", 120), ("fc4", 84), ("fc5", classes)):
        x = add(linear(name, x, neurons))
    return add.graph("LeNet")


def alexnet(
    batch: int = 256, *, width: int = 64, hidden: int = 4096, classes: int = 1000, size: int = 224
) -> OperatorGraph:
    """AlexNet with one column of convolutions."""
    add = Draft()
    x = add(image("image", batch, 3, size, size))
    x = add(pooling("pool1", add(convolution("conv1", x, width, 11, 4, 2)), 3, 2))
    x = add(pooling("pool2", add(convolution("conv2", x, 3 * width, 5, padding=2)), 3, 2))
    for name, channels in (("conv3", 6), ("conv4", 4), ("conv5", 4)):
        x = add(convolution(name, x, channels * width, 3, padding=1))
    x = add(flatten("flat", add(pooling("pool5", x, 3, 2))))
    for name, neurons in (("fc6", hidden), ("fc7", hidden), ("fc8", classes)):
        x = add(linear(name, x, neurons))
    return add.graph("AlexNet")


def resnet(
    batch: int = 64,
    blocks: Sequence[int] = (3, 4, 23, 3),
    *,
    width: int = 64,
    classes: int = 1000,
    size: int = 224,
) -> OperatorGraph:
    """ResNet of bottleneck blocks, with the stride in the 3 by 3 convolution; by default ResNet-101."""
    add = Draft()
    x = add(image("image", batch, 3, size, size))
    x = add(pooling("pool1", add(convolution("conv1", x, width, 7, 2, 3)), 3, 2, 1))
    for level, count in enumerate(blocks):
        for index in range(count):
            stride = 2 if level > 0 and index == 0 else 1
            x = _bottleneck(add, f"block{level + 1}.{index}", x, width * 2**level, stride)
    x = add(pooling("average", x, (x.sizes[2], x.sizes[3])))
    add(linear("fc", add(flatten("flat", x)), classes))
    return add.graph(f"ResNet-{3 * sum(blocks) + 2}")


def _bottleneck(add: Draft, name: str, x: Operator, width: int, stride: int) -> Operator:
    y = add(convolution(f"{name}.conv1", x, width, 1))
    y = add(convolution(f"{name}.conv2", y, width, 3, stride, 1))
    y = add(convolution(f"{name}.conv3", y, 4 * width, 1))
    if stride != 1 or x.sizes[1] != 4 * width:
        x = add(convolution(f"{name}.shortcut", x, 4 * width, 1, stride))
    return add(elementwise(f"{name}.add", y, x))


def inception(batch: int = 64, *, width: int = 32, classes: int = 1000, size: int = 299) -> OperatorGraph:
    """Inception-v3 without its auxiliary classifier. The numbers of channels below are for a `width` of 32."""
    net = _Inception(width)
    add = net.add
    x = add(image("image", batch, 3, size, size))
    x = net.conv("stem.1", x, 32, 3, 2)
    x = net.conv("stem.2", x, 32, 3)
    x = net.conv("stem.3", x, 64, 3, padding=1)
    x = add(pooling("stem.pool1", x, 3, 2))
    x = net.conv("stem.4", x, 80, 1)
    x = net.conv("stem.5", x, 192, 3)
    x = add(pooling("stem.pool2", x, 3, 2))
    for index, pooled in enumerate((32, 64, 64), start=1):
        x = net.a(f"A{index}", x, pooled)
    x = net.b("B", x)
    for index, narrow in enumerate((128, 160, 160, 192), start=1):
        x = net.c(f"C{index}", x, narrow)
    x = net.d("D", x)
    for index in (1, 2):
        x = net.e(f"E{index}", x)
    x = add(pooling("average", x, (x.sizes[2], x.sizes[3])))
    add(linear("fc", add(flatten("flat", x)), classes))
    return add.graph("Inception-v3")


class _Inception:
    """The modules of Inception-v3: each takes an operator and returns the one that concatenates its branches."""

    def __init__(self, width: int) -> None:
        self.add, self.width = Draft(), width

    def conv(
        self, name: str, x: Operator, channels: int, kernel: Kernel, stride: int = 1, padding: Kernel = 0
    ) -> Operator:
        return self.add(convolution(name, x, channels * self.width // 32, kernel, stride, padding))

    def row(self, name: str, x: Operator, *layers: Layer, halve: bool = False) -> Operator:
        """Convolutions, one after the other, that keep height and width; the last halves them if `halve`."""
        for index, (channels, kernel) in enumerate(layers, start=1):
            last = halve and index == len(layers)
            high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
            stride, padding = (2, (0, 0)) if last else (1, (high // 2, wide // 2))
            x = self.conv(f"{name}.{index}", x, channels, kernel, stride, padding)
        return x

    def pooled(self, name: str, x: Operator, channels: int) -> Operator:
        average = self.add(pooling(f"{name}.average", x, 3, 1, 1))
        return self.row(f"{name}.pooled", average, (channels, 1))

    def join(self, name: str, *branches: Operator) -> Operator:
        return self.add(concat(f"{name}.concat", branches))

    def a(self, name: str, x: Operator, pooled: int) -> Operator:
        return self.join(
            name,
            self.row(f"{name}.1x1", x, (64, 1)),
            self.row(f"{name}.5x5", x, (48, 1), (64, 5)),
            self.row(f"{name}.3x3", x, (64, 1), (96, 3), (96, 3)),
            self.pooled(name, x, pooled),
        )

    def b(self, name: str, x: Operator) -> Operator:
        return self.join(
            name,
            self.row(f"{name}.3x3", x, (384, 3), halve=True),
            self.row(f"{name}.twice", x, (64, 1), (96, 3), (96, 3), halve=True),
            self.add(pooling(f"{name}.pool", x, 3, 2)),
        )

    def c(self, name: str, x: Operator, narrow: int) -> Operator:
        n = narrow
        return self.join(
            name,
            self.row(f"{name}.1x1", x, (192, 1)),
            self.row(f"{name}.7x7", x, (n, 1), (n, ROW), (192, COLUMN)),
            self.row(f"{name}.twice", x, (n, 1), (n, COLUMN), (n, ROW), (n, COLUMN), (192, ROW)),
            self.pooled(name, x, 192),
        )

    def d(self, name: str, x: Operator) -> Operator:
        return self.join(
            name,
            self.row(f"{name}.3x3", x, (192, 1), (320, 3), halve=True),
            self.row(f"{name}.7x7", x, (192, 1), (192, ROW), (192, COLUMN), (192, 3), halve=True),
            self.add(pooling(f"{name}.pool", x, 3, 2)),
        )

    def e(self, name: str, x: Operator) -> Operator:
        once = self.row(f"{name}.3x3", x, (384, 1))
        twice = self.row(f"{name}.twice", x, (448, 1), (384, 3))
        parts = [
            self.row(f"{before}.{kernel[0]}x{kernel[1]}", y, (384, kernel))
            for before, y in ((f"{name}.3x3", once), (f"{name}.twice", twice))
            for kernel in ((1, 3), (3, 1))
        ]
        return self.join(name, self.row(f"{name}.1x1", x, (320, 1)), *parts, self.pooled(name, x, 192))
