"""Stage 0 of 1 on cpu:0.

    takes  x                             f64[b, 5, 8]     from the caller
    takes  target                        f64[b, 5, 8]     from the caller
    takes  b                             int              x.shape[0]
    gives  loss                          f64[]            to the caller
    keeps  layer_norm                    f64[b, 5, 8]     for backward
    keeps  mean                          f64[b, 5, 1]     for backward
    keeps  rstd                          f64[b, 5, 1]     for backward
    keeps  getitem_3                     f64[b, 1, 5, 8]  for backward
    keeps  getitem_4                     f64[b, 1, 5, 8]  for backward
    keeps  getitem_5                     f64[b, 1, 5, 8]  for backward
    keeps  scaled_dot_product_attention  f64[b, 1, 5, 8]  for backward
    keeps  logsumexp                     f64[b, 1, 5]     for backward
    keeps  y                             f64[b, 5, 8]     for backward
    keeps  empty_like_2                  f64[b, 5, 8]     for backward
    keeps  x_1                           f64[b, 5, 8]     for backward
    keeps  layer_norm_1                  f64[b, 5, 8]     for backward
    keeps  mean_1                        f64[b, 5, 1]     for backward
    keeps  rstd_1                        f64[b, 5, 1]     for backward
    keeps  linear_2                      f64[b, 5, 16]    for backward
    keeps  h                             f64[b, 5, 16]    for backward
    keeps  empty_like_5                  f64[b, 5, 8]     for backward
    keeps  output                        f64[b, 5, 8]     for backward

35 ops, 600 parameters
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpipe.runtime import Draws, Stage, accumulate, accumulate_mm


class Stage0(Stage):
    states = (
        "norm1.weight",
        "norm1.bias",
        "qkv.weight",
        "qkv.bias",
        "out.weight",
        "out.bias",
        "norm2.weight",
        "norm2.bias",
        "up.weight",
        "up.bias",
        "down.weight",
        "down.bias",
    )
    graded = (
        "norm1.weight",
        "norm1.bias",
        "qkv.weight",
        "qkv.bias",
        "out.weight",
        "out.bias",
        "norm2.weight",
        "norm2.bias",
        "up.weight",
        "up.bias",
        "down.weight",
        "down.bias",
    )

    def forward(self, x: Tensor, target: Tensor, b: int, draw: Draws) -> tuple[Tensor, list[Any]]:
        # backward_nets.py:39  q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        layer_norm, mean, rstd = torch.native_layer_norm(x, [8], self.norm1.weight, self.norm1.bias, 1e-05)
        linear = F.linear(layer_norm, self.qkv.weight, self.qkv.bias)
        q, k, v = linear.chunk(3, dim=-1)

        # backward_nets.py:40  y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_c ...
        getitem_3 = q[:, None]
        getitem_4 = k[:, None]
        getitem_5 = v[:, None]
        scaled_dot_product_attention, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            getitem_3, getitem_4, getitem_5, 0.0, True
        )
        y = scaled_dot_product_attention[:, 0]

        # backward_nets.py:41  x = x + self.drop(self.out(y))
        linear = F.linear(y, self.out.weight, self.out.bias)
        empty_like_2 = torch.empty_like(linear)
        with draw(0):
            empty_like_2.bernoulli_(0.9)
        empty_like_2.div_(0.9)
        dropout = linear * empty_like_2
        del linear
        x_1 = x + dropout
        del dropout

        # backward_nets.py:42  h = F.gelu(self.up(self.norm2(x)))
        layer_norm_1, mean_1, rstd_1 = torch.native_layer_norm(
            x_1, [8], self.norm2.weight, self.norm2.bias, 1e-05
        )
        linear_2 = F.linear(layer_norm_1, self.up.weight, self.up.bias)
        h = F.gelu(linear_2)

        # backward_nets.py:43  return x + self.drop(self.down(h))
        linear = F.linear(h, self.down.weight, self.down.bias)
        empty_like_5 = torch.empty_like(linear)
        with draw(1):
            empty_like_5.bernoulli_(0.9)
        empty_like_5.div_(0.9)
        dropout = linear * empty_like_5
        del linear
        output = x_1 + dropout
        del dropout

        loss = F.mse_loss(output, target)
        return (
            loss,
            [
                x,
                target,
                layer_norm,
                mean,
                rstd,
                getitem_3,
                getitem_4,
                getitem_5,
                scaled_dot_product_attention,
                logsumexp,
                y,
                empty_like_2,
                x_1,
                layer_norm_1,
                mean_1,
                rstd_1,
                linear_2,
                h,
                empty_like_5,
                output,
                b,
            ],
        )

    def backward(
        self, kept: list[Any], sums: list[Tensor | None], dloss: Tensor
    ) -> tuple[list[Any], list[Any]]:
        (
            x,
            target,
            layer_norm,
            mean,
            rstd,
            getitem_3,
            getitem_4,
            getitem_5,
            scaled_dot_product_attention,
            logsumexp,
            y,
            empty_like_2,
            x_1,
            layer_norm_1,
            mean_1,
            rstd_1,
            linear_2,
            h,
            empty_like_5,
            output,
            b,
        ) = kept
        kept.clear()
        # gradient of the loss function
        doutput = torch.ops.aten.mse_loss_backward(dloss, output, target, 1)
        del output, target

        # gradient of backward_nets.py:43  return x + self.drop(self.down(h))
        dlinear = doutput * empty_like_5
        del empty_like_5
        view = dlinear.reshape(-1, 8)
        mm = torch.mm(view, self.down.weight)
        t = view.t()
        view_1 = h.reshape(-1, 16)
        ddown_weight = accumulate_mm(sums[10], t, view_1)
        del h, t, view_1
        ddown_bias = accumulate(sums[11], view.sum(dim=0))
        del view
        dh = mm.reshape(-1, 5, 16)

        # gradient of backward_nets.py:42  h = F.gelu(self.up(self.norm2(x)))
        dlinear = torch.ops.aten.gelu_backward(dh, linear_2)
        del linear_2, dh
        view = dlinear.reshape(-1, 16)
        mm = torch.mm(view, self.up.weight)
        t = view.t()
        view_1 = layer_norm_1.reshape(-1, 8)
        dup_weight = accumulate_mm(sums[8], t, view_1)
        del layer_norm_1, t, view_1
        dup_bias = accumulate(sums[9], view.sum(dim=0))
        del dlinear, view
        dlayer_norm = mm.reshape(-1, 5, 8)
        native_layer_norm_backward, dnorm2_weight, dnorm2_bias = torch.ops.aten.native_layer_norm_backward(
            dlayer_norm, x_1, [8], mean_1, rstd_1, self.norm2.weight, self.norm2.bias, [True, True, True]
        )
        dnorm2_weight = accumulate(sums[6], dnorm2_weight)
        dnorm2_bias = accumulate(sums[7], dnorm2_bias)
        del x_1, mean_1, rstd_1, mm, dlayer_norm
        dx = doutput + native_layer_norm_backward
        del doutput, native_layer_norm_backward

        # gradient of backward_nets.py:41  x = x + self.drop(self.out(y))
        dlinear = dx * empty_like_2
        del empty_like_2, dx
        view = dlinear.reshape(-1, 8)
        mm = torch.mm(view, self.out.weight)
        t = view.t()
        view_1 = y.reshape(-1, 8)
        dout_weight = accumulate_mm(sums[4], t, view_1)
        del y, t, view_1
        dout_bias = accumulate(sums[5], view.sum(dim=0))
        del dlinear, view
        dy = mm.reshape(-1, 5, 8)

        # gradient of backward_nets.py:40  y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, ...
        dscaled_dot_product_attention = torch.ops.aten.select_backward(dy, [b, 1, 5, 8], 1, 0)
        del mm, dy
        (
            dgetitem,
            dgetitem_4,
            dgetitem_5,
        ) = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dscaled_dot_product_attention,
            getitem_3,
            getitem_4,
            getitem_5,
            scaled_dot_product_attention,
            logsumexp,
            0.0,
            True,
        )
        del (
            getitem_3,
            getitem_4,
            getitem_5,
            scaled_dot_product_attention,
            logsumexp,
            dscaled_dot_product_attention,
        )
        dv = dgetitem_5.squeeze(1)
        dk = dgetitem_4.squeeze(1)
        dq = dgetitem.squeeze(1)

        # gradient of backward_nets.py:39  q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        dlinear = torch.cat([dq, dk, dv], dim=2)
        view = dlinear.reshape(-1, 24)
        mm = torch.mm(view, self.qkv.weight)
        t = view.t()
        view_ = layer_norm.reshape(-1, 8)
        dqkv_weight = accumulate_mm(sums[2], t, view_)
        dqkv_bias = accumulate(sums[3], view.sum(dim=0))
        dlayer_norm = mm.reshape(-1, 5, 8)
        _, dnorm1_weight, dnorm1_bias = torch.ops.aten.native_layer_norm_backward(
            dlayer_norm, x, [8], mean, rstd, self.norm1.weight, self.norm1.bias, [False, True, True]
        )
        dnorm1_weight = accumulate(sums[0], dnorm1_weight)
        dnorm1_bias = accumulate(sums[1], dnorm1_bias)
        return (
            [],
            [
                dnorm1_weight,
                dnorm1_bias,
                dqkv_weight,
                dqkv_bias,
                dout_weight,
                dout_bias,
                dnorm2_weight,
                dnorm2_bias,
                dup_weight,
                dup_bias,
                ddown_weight,
                ddown_bias,
            ],
        )
