"""Stage 1 of 4 on cpu:1.

    takes  skip2     f32[b, 32, 8, 8]  from stage 0
    gives  conv2d_8  f32[b, 32, 4, 4]  to stage 2

15 ops, 166,272 parameters; recomputed in backward, except the last micro-batch; forward 695 us, backward 1.29
ms, keeps 262 kB (estimated, b = 8)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpipe.runtime import Stage


class Stage1(Stage):
    states = (
        "down3.conv1.weight",
        "down3.norm.weight",
        "down3.norm.bias",
        "down3.conv2.weight",
        "down3.conv2.bias",
        "middle.conv1.weight",
        "middle.norm.weight",
        "middle.norm.bias",
        "middle.conv2.weight",
        "middle.conv2.bias",
        "up3.conv1.weight",
    )

    def forward(self, skip2: Tensor) -> Tensor:
        # unet.py:40  skip3 = self.down3(F.max_pool2d(skip2, 2))
        max_pool2d = F.max_pool2d(skip2, 2)

        # unet.py:18  down3  x = F.relu(self.norm(self.conv1(x)))
        conv2d = F.conv2d(max_pool2d, self.down3.conv1.weight, padding=1)
        del max_pool2d
        group_norm = F.group_norm(conv2d, 4, self.down3.norm.weight, self.down3.norm.bias)
        x = F.relu(group_norm)
        del group_norm

        # unet.py:19  down3  return F.relu(self.conv2(x))
        conv2d = F.conv2d(x, self.down3.conv2.weight, self.down3.conv2.bias, padding=1)
        del x
        skip3 = F.relu(conv2d)

        # unet.py:41  x = self.middle(F.max_pool2d(skip3, 2))
        max_pool2d = F.max_pool2d(skip3, 2)

        # unet.py:18  middle  x = F.relu(self.norm(self.conv1(x)))
        conv2d = F.conv2d(max_pool2d, self.middle.conv1.weight, padding=1)
        del max_pool2d
        group_norm = F.group_norm(conv2d, 4, self.middle.norm.weight, self.middle.norm.bias)
        x = F.relu(group_norm)
        del group_norm

        # unet.py:19  middle  return F.relu(self.conv2(x))
        conv2d = F.conv2d(x, self.middle.conv2.weight, self.middle.conv2.bias, padding=1)
        x = F.relu(conv2d)
        del conv2d

        # unet.py:42  x = self.up3(torch.cat([F.interpolate(x, scale_factor=2), skip3], dim=1))
        interpolate = F.interpolate(x, scale_factor=2)
        del x
        cat = torch.cat([interpolate, skip3], dim=1)
        del skip3, interpolate

        # unet.py:18  up3.conv1  x = F.relu(self.norm(self.conv1(x)))
        return F.conv2d(cat, self.up3.conv1.weight, padding=1)
