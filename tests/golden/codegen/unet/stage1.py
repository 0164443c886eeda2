"""Stage 1 of 3 on cuda:1.

    takes  max_pool2d  f32[b, 4, 4, 4]  from stage 0
    gives  relu_1      f32[b, 4, 4, 4]  to stage 2

3 ops, 152 parameters; recomputed in backward, except the last micro-batch
"""

import torch.nn.functional as F
from torch import Tensor

from fxpipe.runtime import Stage


class Stage1(Stage):
    states = (
        "middle.conv.weight",
        "middle.norm.running_mean",
        "middle.norm.running_var",
        "middle.norm.weight",
        "middle.norm.bias",
    )

    def forward(self, max_pool2d: Tensor) -> Tensor:
        # unet.py:14  middle  x = self.middle(x)
        conv2d = F.conv2d(max_pool2d, self.middle.conv.weight, padding=1)
        batch_norm = F.batch_norm(
            conv2d,
            self.middle.norm.running_mean,
            self.middle.norm.running_var,
            self.middle.norm.weight,
            self.middle.norm.bias,
            training=True,
        )
        return F.relu(batch_norm)
