"""Stage 0 of 1 on cpu:0.

    takes  x             f64[b, 5, 8]   from the caller
    takes  target        f64[b, 5, 8]   from the caller
    gives  loss          f64[]          to the caller
    keeps  layer_norm    f64[b, 5, 8]   for backward
    keeps  mean          f64[b, 5, 1]   for backward
    keeps  rstd          f64[b, 5, 1]   for backward
    keeps  v             f64[b, 5, 8]   for backward
    keeps  mul           f64[b, 5, 8]   for backward
    keeps  mul_1         f64[b, 8, 5]   for backward
    keeps  safe_softmax  f64[b, 5, 5]   for backward
    keeps  y             f64[b, 5, 8]   for backward
    keeps  empty_like_2  f64[b, 5, 8]   for backward
    keeps  x_1           f64[b, 5, 8]   for backward
    keeps  layer_norm_1  f64[b, 5, 8]   for backward
    keeps  mean_1        f64[b, 5, 1]   for backward
    keeps  rstd_1        f64[b, 5, 1]   for backward
    keeps  linear_2      f64[b, 5, 16]  for backward
    keeps  h             f64[b, 5, 16]  for backward
    keeps  empty_like_5  f64[b, 5, 8]   for backward
    keeps  output        f64[b, 5, 8]   for backward

41 ops, 600 parameters
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

    def forward(self, x: Tensor, target: Tensor, draw: Draws) -> tuple[Tensor, list[Any]]:
        # backward_nets.py:39  q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        layer_norm, mean, rstd = torch.native_layer_norm(x, [8], self.norm1.weight, self.norm1.bias, 1e-05)
        linear = F.linear(layer_norm, self.qkv.weight, self.qkv.bias)
        q, k, v = linear.chunk(3, dim=-1)

        # backward_nets.py:40  y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mul = q * 0.5946035575013605
        del q
        ones = torch.ones([5, 5], dtype=torch.bool, device=torch.device("cpu"))
        tril = torch.tril(ones)
        scalar_tensor = torch.scalar_tensor(float("-inf"), dtype=torch.float64, device=torch.device("cpu"))
        scalar_tensor_1 = torch.scalar_tensor(0.0, dtype=torch.float64, device=torch.device("cpu"))
        where = torch.where(tril, scalar_tensor_1, scalar_tensor)
        transpose = k.transpose(-2, -1)
        mul_1 = transpose * 0.5946035575013605
        del k, transpose
        bmm = torch.bmm(mul, mul_1)
        add = bmm + where
        safe_softmax = torch.ops.aten._safe_softmax(add, -1)
        del add
        bmm = torch.bmm(safe_softmax, v)
        y = bmm.reshape(-1, 5, 8)

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
                v,
                mul,
                mul_1,
                safe_softmax,
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
            v,
            mul,
            mul_1,
            safe_softmax,
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
        view_10_ = h.reshape(-1, 16)
        ddown_weight = accumulate_mm(sums[10], t, view_10_)
        del h, t, view_10_
        ddown_bias = accumulate(sums[11], view.sum(dim=0))
        del view
        dh = mm.reshape(-1, 5, 16)

        # gradient of backward_nets.py:42  h = F.gelu(self.up(self.norm2(x)))
        dlinear = torch.ops.aten.gelu_backward(dh, linear_2)
        del linear_2, dh
        view = dlinear.reshape(-1, 16)
        mm = torch.mm(view, self.up.weight)
        t = view.t()
        view_8_ = layer_norm_1.reshape(-1, 8)
        dup_weight = accumulate_mm(sums[8], t, view_8_)
        del layer_norm_1, t, view_8_
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
        view_6_ = y.reshape(-1, 8)
        dout_weight = accumulate_mm(sums[4], t, view_6_)
        del y, t, view_6_
        dout_bias = accumulate(sums[5], view.sum(dim=0))
        del dlinear, view
        dy = mm.reshape(-1, 5, 8)

        # gradient of backward_nets.py:40  y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        transpose = safe_softmax.transpose(1, 2)
        dv = torch.bmm(transpose, dy)
        transpose = v.transpose(1, 2)
        bmm = torch.bmm(dy, transpose)
        del v, mm, dy
        softmax_backward_data = torch.ops.aten._softmax_backward_data(bmm, safe_softmax, -1, torch.float64)
        del safe_softmax
        transpose = mul.transpose(1, 2)
        bmm = torch.bmm(transpose, softmax_backward_data)
        del mul
        transpose = mul_1.transpose(1, 2)
        bmm_5 = torch.bmm(softmax_backward_data, transpose)
        del mul_1, softmax_backward_data, transpose
        mul = bmm * 0.5946035575013605
        del bmm
        dk = mul.transpose(-2, -1)
        dq = bmm_5 * 0.5946035575013605
        del bmm_5

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
