"""Stage 1 of 2 on cpu:1.

    takes  target        f64[b, 8]   from the caller
    takes  linear_1      f64[b, 16]  from stage 0
    gives  loss          f64[]       to the caller
    keeps  empty_like_2  f64[b, 16]  for backward
    keeps  output        f64[b, 8]   for backward

7 ops, 136 parameters; what is cheap to compute is recomputed in backward
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpipe.runtime import Draws, Stage, accumulate, accumulate_mm


class Stage1(Stage):
    states = ("down.weight", "down.bias")
    graded = ("down.weight", "down.bias")  # of which backward returns gradients

    def forward(self, target: Tensor, linear_1: Tensor, draw: Draws) -> tuple[Tensor, list[Any]]:
        # backward_nets.py:68  h = F.gelu(self.up(x))
        h = F.gelu(linear_1)

        # backward_nets.py:69  return self.down(F.dropout(h, 0.1, self.training))
        empty_like_2 = torch.empty_like(h)
        with draw(0):
            empty_like_2.bernoulli_(0.9)
        empty_like_2.div_(0.9)
        dropout = h * empty_like_2
        del h
        output = F.linear(dropout, self.down.weight, self.down.bias)
        del dropout

        loss = F.mse_loss(output, target)
        return loss, [target, linear_1, empty_like_2, output]

    def backward(
        self, kept: list[Any], sums: list[Tensor | None], dloss: Tensor
    ) -> tuple[list[Any], list[Any]]:
        target, linear_1, empty_like_2, output = kept
        kept.clear()
        # gradient of the loss function
        doutput = torch.ops.aten.mse_loss_backward(dloss, output, target, 1)
        del output, target

        # gradient of backward_nets.py:69  down  return self.down(F.dropout(h, 0.1, self.training))
        ddropout = torch.mm(doutput, self.down.weight)
        t = doutput.t()

        # recomputed: backward_nets.py:68  h = F.gelu(self.up(x))
        h_ = torch.ops.aten.gelu(linear_1)

        # recomputed: backward_nets.py:69  return self.down(F.dropout(h, 0.1, self.training))
        dropout_ = h_ * empty_like_2
        del h_

        # gradient of backward_nets.py:69  return self.down(F.dropout(h, 0.1, self.training))
        ddown_weight = accumulate_mm(sums[0], t, dropout_)
        del t, dropout_
        ddown_bias = accumulate(sums[1], doutput.sum(dim=0))
        del doutput
        dh = ddropout * empty_like_2
        del empty_like_2, ddropout

        # gradient of backward_nets.py:68  h = F.gelu(self.up(x))
        dlinear_1 = torch.ops.aten.gelu_backward(dh, linear_1)
        return [dlinear_1], [ddown_weight, ddown_bias]

    def input_gradient(self, kept: list[Any], dloss: Tensor) -> tuple[list[Any], list[Any]]:
        target, linear_1, empty_like_2, output = kept
        kept.clear()
        # gradient of the loss function
        doutput = torch.ops.aten.mse_loss_backward(dloss, output, target, 1)
        del output, target

        # gradient of backward_nets.py:69  down  return self.down(F.dropout(h, 0.1, self.training))
        ddropout = torch.mm(doutput, self.down.weight)

        # recomputed: backward_nets.py:68  h = F.gelu(self.up(x))
        h_ = torch.ops.aten.gelu(linear_1)

        # recomputed: backward_nets.py:69  return self.down(F.dropout(h, 0.1, self.training))
        dropout_ = h_ * empty_like_2
        del h_

        # gradient of backward_nets.py:69  return self.down(F.dropout(h, 0.1, self.training))
        dh = ddropout * empty_like_2
        del empty_like_2, ddropout

        # gradient of backward_nets.py:68  h = F.gelu(self.up(x))
        dlinear_1 = torch.ops.aten.gelu_backward(dh, linear_1)
        return [dlinear_1], [doutput, dropout_]

    def weight_gradient(self, kept: list[Any], sums: list[Tensor | None]) -> list[Any]:
        doutput, dropout_ = kept
        kept.clear()
        # gradient of backward_nets.py:69  down  return self.down(F.dropout(h, 0.1, self.training))
        t = doutput.t()
        ddown_weight = accumulate_mm(sums[0], t, dropout_)
        ddown_bias = accumulate(sums[1], doutput.sum(dim=0))
        return [ddown_weight, ddown_bias]
