"""Stage 3 of 4 on cpu:3.

    takes  image  f32[b, 1, 16, 16]   from the caller
    takes  cat_2  f32[b, 32, 16, 16]  from stage 2
    gives  sub    f32[b, 1, 16, 16]   to the caller

7 ops, 6,977 parameters; recomputed in backward, except the last micro-batch; forward 696 us, backward 1.29
ms, keeps 655 kB (estimated, b = 8)
"""

import torch.nn.functional as F
from torch import Tensor

from fxpipe.runtime import Stage


class Stage3(Stage):
    states = (
        "up1.conv1.weight",
        "up1.norm.weight",
        "up1.norm.bias",
        "up1.conv2.weight",
        "up1.conv2.bias",
        "head.weight",
        "head.bias",
    )

    def forward(self, image: Tensor, cat_2: Tensor) -> Tensor:
        # unet.py:18  up1  x = F.relu(self.norm(self.conv1(x)))
        conv2d = F.conv2d(cat_2, self.up1.conv1.weight, padding=1)
        group_norm = F.group_norm(conv2d, 4, self.up1.norm.weight, self.up1.norm.bias)
        x = F.relu(group_norm)
        del group_norm

        # unet.py:19  up1  return F.relu(self.conv2(x))
        conv2d = F.conv2d(x, self.up1.conv2.weight, self.up1.conv2.bias, padding=1)
        x = F.relu(conv2d)
        del conv2d

        # unet.py:45  head  noise = self.head(x)
        noise = F.conv2d(x, self.head.weight, self.head.bias)
        del x

        # unet.py:46  return image - noise
        return image - noise
