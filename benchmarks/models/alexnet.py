"""AlexNet with one column of convolutions: five of them, then three fully connected layers that hold nearly all the
weights. What one does for the former (cut the samples) is wrong for the latter (cut the weights)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class AlexNet(nn.Module):
    """`width` channels out of the first convolution, `hidden` neurons in the two hidden layers, for square images of
    `size` pixels: at least 63, or nothing is left after the third pooling."""

    def __init__(self, *, width: int = 64, hidden: int = 4096, classes: int = 1000, size: int = 224) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 11, stride=4, padding=2)
        self.conv2 = nn.Conv2d(width, 3 * width, 5, padding=2)
        self.conv3 = nn.Conv2d(3 * width, 6 * width, 3, padding=1)
        self.conv4 = nn.Conv2d(6 * width, 4 * width, 3, padding=1)
        self.conv5 = nn.Conv2d(4 * width, 4 * width, 3, padding=1)
        left = pooled(pooled(pooled((size - 7) // 4 + 1)))
        if left < 1:
            raise ValueError(f"images of {size} pixels are too small: nothing is left after the third pooling")
        self.fc6 = nn.Linear(4 * width * left * left, hidden)
        self.fc7 = nn.Linear(hidden, hidden)
        self.fc8 = nn.Linear(hidden, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(image)), 3, stride=2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 3, stride=2)
        x = F.relu(self.conv3(x))
        x = F.relu(self.conv4(x))
        x = F.max_pool2d(F.relu(self.conv5(x)), 3, stride=2)
        x = F.relu(self.fc6(x.flatten(1)))
        x = F.relu(self.fc7(x))
        return self.fc8(x)


def pooled(size: int) -> int:
    """Pixels that a pooling of 3 by 3 with stride 2 leaves of `size`."""
    return (size - 3) // 2 + 1
