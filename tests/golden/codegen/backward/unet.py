"""Stage 0 of 1 on cpu:0.

    takes    image                     f64[b, 1, 8, 8]  from the caller
    takes    target                    f64[b, 2, 8, 8]  from the caller
    takes    b                         int              image.shape[0]
    gives    loss                      f64[]            to the caller
    updates  norm.num_batches_tracked  i64[]            in place, once per micro-batch
    updates  norm.running_mean         f64[4]           in place, once per micro-batch
    updates  norm.running_var          f64[4]           in place, once per micro-batch
    keeps    conv2d                    f64[b, 4, 8, 8]  for backward
    keeps    mean                      f64[4]           for backward
    keeps    invstd                    f64[4]           for backward
    keeps    skip                      f64[b, 4, 8, 8]  for backward
    keeps    x                         f64[b, 4, 4, 4]  for backward
    keeps    indices                   i64[b, 4, 4, 4]  for backward
    keeps    x_1                       f64[b, 4, 4, 4]  for backward
    keeps    cat                       f64[b, 8, 8, 8]  for backward
    keeps    output                    f64[b, 2, 8, 8]  for backward

16 ops, 342 parameters
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpipe.runtime import Stage, accumulate


class Stage0(Stage):
    states = (
        "down.weight",
        "down.bias",
        "norm.num_batches_tracked",
        "norm.running_mean",
        "norm.running_var",
        "norm.weight",
        "norm.bias",
        "middle.weight",
        "middle.bias",
        "up.weight",
        "up.bias",
    )
    mutates = ("norm.num_batches_tracked", "norm.running_mean", "norm.running_var")
    graded = (
        "down.weight",
        "down.bias",
        "norm.weight",
        "norm.bias",
        "middle.weight",
        "middle.bias",
        "up.weight",
        "up.bias",
    )

    def forward(self, image: Tensor, target: Tensor, b: int) -> tuple[Tensor, list[Any]]:
        # backward_nets.py:21  skip = F.relu(self.norm(self.down(image)))
        conv2d = F.conv2d(image, self.down.weight, self.down.bias, padding=1)
        self.norm.num_batches_tracked.add_(1)
        batch_norm, mean, invstd = torch.native_batch_norm(
            conv2d,
            self.norm.weight,
            self.norm.bias,
            self.norm.running_mean,
            self.norm.running_var,
            True,
            0.1,
            1e-05,
        )
        skip = F.relu(batch_norm)
        del batch_norm

        # backward_nets.py:22  x = F.max_pool2d(skip, 2)
        x, indices = torch.ops.aten.max_pool2d_with_indices(skip, [2, 2])

        # backward_nets.py:23  x = F.relu(self.middle(x))
        conv2d_1 = F.conv2d(x, self.middle.weight, self.middle.bias, padding=1)
        x_1 = F.relu(conv2d_1)
        del conv2d_1

        # backward_nets.py:24  x = F.interpolate(x, scale_factor=2)
        x_2 = F.interpolate(x_1, scale_factor=2)

        # backward_nets.py:25  return self.up(torch.cat([x, skip], dim=1))
        cat = torch.cat([x_2, skip], dim=1)
        del x_2
        output = F.conv2d(cat, self.up.weight, self.up.bias, padding=1)

        loss = F.mse_loss(output, target)
        return loss, [image, target, conv2d, mean, invstd, skip, x, indices, x_1, cat, output, b]

    def backward(
        self, kept: list[Any], sums: list[Tensor | None], dloss: Tensor
    ) -> tuple[list[Any], list[Any]]:
        image, target, conv2d, mean, invstd, skip, x, indices, x_1, cat, output, b = kept
        kept.clear()
        # gradient of the loss function
        doutput = torch.ops.aten.mse_loss_backward(dloss, output, target, 1)
        del output, target

        # gradient of backward_nets.py:25  return self.up(torch.cat([x, skip], dim=1))
        dcat, dup_weight, dup_bias = torch.ops.aten.convolution_backward(
            doutput, cat, self.up.weight, [2], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
        )
        dup_weight = accumulate(sums[6], dup_weight)
        dup_bias = accumulate(sums[7], dup_bias)
        del doutput, cat
        dx = dcat[:, :4]
        slice_ = dcat[:, 4:8]

        # gradient of backward_nets.py:24  x = F.interpolate(x, scale_factor=2)
        dx = torch.ops.aten.upsample_nearest2d_backward(dx, [8, 8], [b, 4, 4, 4], 2.0, 2.0)

        # gradient of backward_nets.py:23  x = F.relu(self.middle(x))
        dconv2d = torch.ops.aten.threshold_backward(dx, x_1, 0)
        del x_1
        dx, dmiddle_weight, dmiddle_bias = torch.ops.aten.convolution_backward(
            dconv2d, x, self.middle.weight, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
        )
        dmiddle_weight = accumulate(sums[4], dmiddle_weight)
        dmiddle_bias = accumulate(sums[5], dmiddle_bias)
        del x, dconv2d

        # gradient of backward_nets.py:22  x = F.max_pool2d(skip, 2)
        max_pool2d_with_indices_backward = torch.ops.aten.max_pool2d_with_indices_backward(
            dx, skip, [2, 2], [], [0, 0], [1, 1], False, indices
        )
        del indices, dx
        dskip = slice_ + max_pool2d_with_indices_backward
        del dcat, slice_, max_pool2d_with_indices_backward

        # gradient of backward_nets.py:21  skip = F.relu(self.norm(self.down(image)))
        dbatch_norm = torch.ops.aten.threshold_backward(dskip, skip, 0)
        dconv2d, dnorm_weight, dnorm_bias = torch.ops.aten.native_batch_norm_backward(
            dbatch_norm, conv2d, self.norm.weight, None, None, mean, invstd, True, 1e-05, [True, True, True]
        )
        dnorm_weight = accumulate(sums[2], dnorm_weight)
        dnorm_bias = accumulate(sums[3], dnorm_bias)
        _, ddown_weight, ddown_bias = torch.ops.aten.convolution_backward(
            dconv2d,
            image,
            self.down.weight,
            [4],
            [1, 1],
            [1, 1],
            [1, 1],
            False,
            [0, 0],
            1,
            [False, True, True],
        )
        ddown_weight = accumulate(sums[0], ddown_weight)
        ddown_bias = accumulate(sums[1], ddown_bias)
        return (
            [],
            [
                ddown_weight,
                ddown_bias,
                dnorm_weight,
                dnorm_bias,
                dmiddle_weight,
                dmiddle_bias,
                dup_weight,
                dup_bias,
            ],
        )
