"""Stage 2 of 4 on cpu:2.

    takes  skip1     f32[b, 16, 16, 16]  from stage 0, through a portal
    takes  skip2     f32[b, 32, 8, 8]    from stage 0, through a portal
    takes  conv2d_8  f32[b, 32, 4, 4]    from stage 1
    gives  cat_2     f32[b, 32, 16, 16]  to stage 3

13 ops, 20,880 parameters; recomputed in backward, except the last micro-batch; forward 481 us, backward 772
us, keeps 279 kB (estimated, b = 8)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpipe.runtime import Stage


class Stage2(Stage):
    states = (
        "up3.norm.weight",
        "up3.norm.bias",
        "up3.conv2.weight",
        "up3.conv2.bias",
        "up2.conv1.weight",
        "up2.norm.weight",
        "up2.norm.bias",
        "up2.conv2.weight",
        "up2.conv2.bias",
    )

    def forward(self, skip1: Tensor, skip2: Tensor, conv2d_8: Tensor) -> Tensor:
        # unet.py:18  up3  x = F.relu(self.norm(self.conv1(x)))
        group_norm = F.group_norm(conv2d_8, 4, self.up3.norm.weight, self.up3.norm.bias)
        x = F.relu(group_norm)
        del group_norm

        # unet.py:19  up3  return F.relu(self.conv2(x))
        conv2d = F.conv2d(x, self.up3.conv2.weight, self.up3.conv2.bias, padding=1)
        x = F.relu(conv2d)
        del conv2d

        # unet.py:43  x = self.up2(torch.cat([F.interpolate(x, scale_factor=2), skip2], dim=1))
        interpolate = F.interpolate(x, scale_factor=2)
        del x
        cat = torch.cat([interpolate, skip2], dim=1)
        del interpolate

        # unet.py:18  up2  x = F.relu(self.norm(self.conv1(x)))
        conv2d = F.conv2d(cat, self.up2.conv1.weight, padding=1)
        del cat
        group_norm = F.group_norm(conv2d, 4, self.up2.norm.weight, self.up2.norm.bias)
        x = F.relu(group_norm)
        del group_norm

        # unet.py:19  up2  return F.relu(self.conv2(x))
        conv2d = F.conv2d(x, self.up2.conv2.weight, self.up2.conv2.bias, padding=1)
        x = F.relu(conv2d)
        del conv2d

        # unet.py:44  x = self.up1(torch.cat([F.interpolate(x, scale_factor=2), skip1], dim=1))
        interpolate = F.interpolate(x, scale_factor=2)
        return torch.cat([interpolate, skip1], dim=1)
