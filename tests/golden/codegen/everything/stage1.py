"""Stage 1 of 2 on cpu:0.

    takes    x             f32[b, 4]  from stage 0
    takes    b             int        x.shape[0]
    borrows  embed_weight  f32[4, 4]  from stage 0, once a step: embed.weight
    gives    y             f32[b, 4]  to the caller
    updates  seen          i64[]      in place, once per micro-batch

14 ops, 16 parameters
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpipe.runtime import Draws, Stage


class Stage1(Stage):
    states = ("layers.0.weight", "seen")
    constants = ("scale",)
    mutates = ("seen",)
    rereads = ("seen",)

    def forward(self, x: Tensor, b: int, embed_weight: Tensor, draw: Draws) -> Tensor:
        # net.py:10  self.seen += 1
        self.seen.add_(1)

        # net.py:11  h = self.layers[0](x)
        h = F.linear(x, self.layers[0].weight)

        # net.py:12  h = self.drop(h)
        with draw(3):
            h = F.dropout(h, p=0.1)

        # net.py:13  h[:, 0] = h.new_zeros(...)
        zeros = torch.zeros(b, 4)

        # net.py:13  h[:, 0] = 0
        h[:, 0] = 0.0

        # net.py:14  with torch.no_grad(): h *= scale
        mul = h * self.scale
        del h

        # net.py:15  h += zeros
        mul += zeros
        del zeros

        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            # net.py:16  a = F.softmax(h)
            softmax = F.softmax(mul, dim=-1)
            del mul

            # net.py:17  a = a.log()
            log = softmax.log()
            del softmax

        # net.py:18  p, q = torch.chunk(a, 2)
        p, q = torch.chunk(log, 2, dim=1)

        # net.py:19  y = torch.cat([q, p], dim=1)
        cat = torch.cat([q, p], dim=1)
        del log, p, q

        # net.py:20  return y @ self.embed.weight.T
        y = F.linear(cat, embed_weight)
        return y
