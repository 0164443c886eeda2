"""Stage 0 of 2 on cpu:0.

    takes  x        f64[b, 8]  from the caller
    gives  x_1      f64[b, 8]  to stage 1
    keeps  sigmoid  f64[b, 8]  for backward

3 ops, 72 parameters
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpipe.runtime import Stage, accumulate, accumulate_mm


class Stage0(Stage):
    states = ("gate.weight", "gate.bias")
    graded = ("gate.weight", "gate.bias")  # of which backward returns gradients

    def forward(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        # backward_nets.py:67  x = x * torch.sigmoid(self.gate(x))
        linear = F.linear(x, self.gate.weight, self.gate.bias)
        sigmoid = torch.sigmoid(linear)
        x_1 = x * sigmoid
        return x_1, [x, sigmoid]

    def backward(
        self, kept: list[Any], sums: list[Tensor | None], dx_1: Tensor
    ) -> tuple[list[Any], list[Any]]:
        x, sigmoid = kept
        kept.clear()
        # gradient of backward_nets.py:67  x = x * torch.sigmoid(self.gate(x))
        dsigmoid = dx_1 * x
        dlinear = torch.ops.aten.sigmoid_backward(dsigmoid, sigmoid)
        t = dlinear.t()
        dgate_weight = accumulate_mm(sums[0], t, x)
        dgate_bias = accumulate(sums[1], dlinear.sum(dim=0))
        return [], [dgate_weight, dgate_bias]

    def forward_beside_backward_1(
        self, other: Stage, x: Tensor, kept: list[Any], sums: list[Tensor | None], dloss: Tensor
    ) -> tuple[Tensor, list[Any], list[Any], list[Any]]:
        """Forward of micro-batch i, beside the backward of stage 1 on micro-batch j."""
        target, x_1_, linear_1, empty_like_2, dropout, output = kept
        kept.clear()

        # i: backward_nets.py:67  x = x * torch.sigmoid(self.gate(x))
        linear = F.linear(x, self.gate.weight, self.gate.bias)

        # j: gradient of the loss function
        doutput = torch.ops.aten.mse_loss_backward(dloss, output, target, 1)
        del output, target

        # j: gradient of backward_nets.py:69  return self.down(F.dropout(h, 0.1, self.training))
        ddropout = torch.mm(doutput, other.down.weight)
        t = doutput.t()
        ddown_weight = accumulate_mm(sums[2], t, dropout)
        del dropout, t
        ddown_bias = accumulate(sums[3], doutput.sum(dim=0))
        del doutput
        dh = ddropout * empty_like_2
        del empty_like_2, ddropout

        # j: gradient of backward_nets.py:68  h = F.gelu(self.up(x))
        dlinear = torch.ops.aten.gelu_backward(dh, linear_1)
        dx_1 = torch.mm(dlinear, other.up.weight)

        # i: backward_nets.py:67  x = x * torch.sigmoid(self.gate(x))
        sigmoid = torch.sigmoid(linear)
        x_1 = x * sigmoid

        # j: gradient of backward_nets.py:68  h = F.gelu(self.up(x))
        t = dlinear.t()
        dup_weight = accumulate_mm(sums[0], t, x_1_)
        dup_bias = accumulate(sums[1], dlinear.sum(dim=0))

        return x_1, [x, sigmoid], [dx_1], [dup_weight, dup_bias, ddown_weight, ddown_bias]
