"""Stage 0 of 1 on cpu:0.

    takes  x                 f64[b, 3, 4]  from the caller
    takes  target            f64[b, 3]     from the caller
    takes  b                 int           x.shape[0]
    gives  loss              f64[]         to the caller
    keeps  unbind_0          f64[b, 4]     for backward
    keeps  unbind_0_1        f64[b, 4]     for backward
    keeps  clone             f64[3, b, 4]  for backward
    keeps  unsafe_split_4    f64[b, 4]     for backward
    keeps  unsafe_split_5    f64[b, 4]     for backward
    keeps  unsafe_split_6    f64[b, 4]     for backward
    keeps  unsafe_split_7    f64[b, 4]     for backward
    keeps  mul_2             f64[b, 4]     for backward
    keeps  tanh              f64[b, 4]     for backward
    keeps  mul_3             f64[b, 4]     for backward
    keeps  unsafe_split_0_2  f64[b, 4]     for backward
    keeps  unsafe_split_1_2  f64[b, 4]     for backward
    keeps  unsafe_split_2_2  f64[b, 4]     for backward
    keeps  unsafe_split_3_2  f64[b, 4]     for backward
    keeps  mul_6             f64[b, 4]     for backward
    keeps  tanh_1            f64[b, 4]     for backward
    keeps  mul_7             f64[b, 4]     for backward
    keeps  unsafe_split_0_4  f64[b, 4]     for backward
    keeps  unsafe_split_1_4  f64[b, 4]     for backward
    keeps  unsafe_split_2_4  f64[b, 4]     for backward
    keeps  unsafe_split_3_4  f64[b, 4]     for backward
    keeps  tanh_2            f64[b, 4]     for backward
    keeps  getitem_9         f64[b, 4]     for backward
    keeps  output_1          f64[b, 3]     for backward

73 ops, 175 parameters
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpipe.runtime import Stage, accumulate, accumulate_mm


class Stage0(Stage):
    states = (
        "lstm.weight_ih_l0",
        "lstm.weight_hh_l0",
        "lstm.bias_ih_l0",
        "lstm.bias_hh_l0",
        "head.weight",
        "head.bias",
    )
    graded = (
        "lstm.weight_ih_l0",
        "lstm.weight_hh_l0",
        "lstm.bias_ih_l0",
        "lstm.bias_hh_l0",
        "head.weight",
        "head.bias",
    )

    def forward(self, x: Tensor, target: Tensor, b: int) -> tuple[Tensor, list[Any]]:
        # backward_nets.py:55  lstm  y, _ = self.lstm(x)
        h_zeros = torch.zeros(1, b, 4, dtype=torch.float64, device=self.device)
        c_zeros = torch.zeros(1, b, 4, dtype=torch.float64, device=self.device)
        transpose = x.transpose(0, 1)
        unbind = torch.unbind(h_zeros)
        unbind_0 = unbind[0]
        unbind = torch.unbind(c_zeros)
        unbind_0_1 = unbind[0]
        t = self.lstm.weight_ih_l0.t()
        clone = transpose.clone(memory_format=torch.contiguous_format)
        del transpose
        unsafe_view = clone.reshape(-1, 4)
        mm = torch.mm(unsafe_view, t)
        unsafe_view = mm.reshape(3, -1, 16)
        add = unsafe_view + self.lstm.bias_ih_l0
        del mm, unsafe_view
        unbind_0_2, unbind_1, unbind_2 = torch.unbind(add)
        t = self.lstm.weight_hh_l0.t()
        addmm = torch.addmm(self.lstm.bias_hh_l0, unbind_0, t)
        addmm = torch.ops.aten.add_.Tensor(addmm, unbind_0_2)
        del unbind_0_2
        unsafe_split, unsafe_split_1, unsafe_split_2, unsafe_split_3 = torch.unsafe_split(addmm, 4, 1)
        del addmm
        unsafe_split_4 = torch.sigmoid_(unsafe_split)
        unsafe_split_5 = torch.sigmoid_(unsafe_split_1)
        unsafe_split_6 = torch.tanh_(unsafe_split_2)
        unsafe_split_7 = torch.sigmoid_(unsafe_split_3)
        mul = unsafe_split_5 * unbind_0_1
        mul_1 = unsafe_split_4 * unsafe_split_6
        mul_2 = torch.ops.aten.add_.Tensor(mul, mul_1)
        del mul_1
        tanh = torch.tanh(mul_2)
        mul_3 = unsafe_split_7 * tanh
        t = self.lstm.weight_hh_l0.t()
        addmm = torch.addmm(self.lstm.bias_hh_l0, mul_3, t)
        addmm = torch.ops.aten.add_.Tensor(addmm, unbind_1)
        del unbind_1
        unsafe_split_0, unsafe_split_1, unsafe_split_2, unsafe_split_3 = torch.unsafe_split(addmm, 4, 1)
        del addmm
        unsafe_split_0_2 = torch.sigmoid_(unsafe_split_0)
        unsafe_split_1_2 = torch.sigmoid_(unsafe_split_1)
        unsafe_split_2_2 = torch.tanh_(unsafe_split_2)
        unsafe_split_3_2 = torch.sigmoid_(unsafe_split_3)
        mul = unsafe_split_1_2 * mul_2
        mul_5 = unsafe_split_0_2 * unsafe_split_2_2
        mul_6 = torch.ops.aten.add_.Tensor(mul, mul_5)
        del mul_5
        tanh_1 = torch.tanh(mul_6)
        mul_7 = unsafe_split_3_2 * tanh_1
        t = self.lstm.weight_hh_l0.t()
        addmm = torch.addmm(self.lstm.bias_hh_l0, mul_7, t)
        addmm = torch.ops.aten.add_.Tensor(addmm, unbind_2)
        del add, unbind_2
        unsafe_split_0, unsafe_split_1, unsafe_split_2, unsafe_split_3 = torch.unsafe_split(addmm, 4, 1)
        del addmm
        unsafe_split_0_4 = torch.sigmoid_(unsafe_split_0)
        unsafe_split_1_4 = torch.sigmoid_(unsafe_split_1)
        unsafe_split_2_4 = torch.tanh_(unsafe_split_2)
        unsafe_split_3_4 = torch.sigmoid_(unsafe_split_3)
        mul = unsafe_split_1_4 * mul_6
        mul_9 = unsafe_split_0_4 * unsafe_split_2_4
        mul = torch.ops.aten.add_.Tensor(mul, mul_9)
        del mul_9
        tanh_2 = torch.tanh(mul)
        mul = unsafe_split_3_4 * tanh_2
        stack = torch.stack([mul_3, mul_7, mul])
        del mul
        output = stack.transpose(0, 1)

        # backward_nets.py:56  return self.head(y[:, -1])
        getitem_9 = output[:, -1]
        output_1 = F.linear(getitem_9, self.head.weight, self.head.bias)

        loss = F.mse_loss(output_1, target)
        return (
            loss,
            [
                target,
                b,
                unbind_0,
                unbind_0_1,
                clone,
                unsafe_split_4,
                unsafe_split_5,
                unsafe_split_6,
                unsafe_split_7,
                mul_2,
                tanh,
                mul_3,
                unsafe_split_0_2,
                unsafe_split_1_2,
                unsafe_split_2_2,
                unsafe_split_3_2,
                mul_6,
                tanh_1,
                mul_7,
                unsafe_split_0_4,
                unsafe_split_1_4,
                unsafe_split_2_4,
                unsafe_split_3_4,
                tanh_2,
                getitem_9,
                output_1,
            ],
        )

    def input_gradient(self, kept: list[Any], dloss: Tensor) -> tuple[list[Any], list[Any]]:
        (
            target,
            b,
            unbind_0,
            unbind_0_1,
            clone,
            unsafe_split_4,
            unsafe_split_5,
            unsafe_split_6,
            unsafe_split_7,
            mul_2,
            tanh,
            mul_3,
            unsafe_split_0_2,
            unsafe_split_1_2,
            unsafe_split_2_2,
            unsafe_split_3_2,
            mul_6,
            tanh_1,
            mul_7,
            unsafe_split_0_4,
            unsafe_split_1_4,
            unsafe_split_2_4,
            unsafe_split_3_4,
            tanh_2,
            getitem_9,
            output_1,
        ) = kept
        kept.clear()
        return (
            [],
            [
                target,
                b,
                unbind_0,
                unbind_0_1,
                clone,
                unsafe_split_4,
                unsafe_split_5,
                unsafe_split_6,
                unsafe_split_7,
                mul_2,
                tanh,
                mul_3,
                unsafe_split_0_2,
                unsafe_split_1_2,
                unsafe_split_2_2,
                unsafe_split_3_2,
                mul_6,
                tanh_1,
                mul_7,
                unsafe_split_0_4,
                unsafe_split_1_4,
                unsafe_split_2_4,
                unsafe_split_3_4,
                tanh_2,
                getitem_9,
                output_1,
                dloss,
            ],
        )

    def weight_gradient(self, kept: list[Any], sums: list[Tensor | None]) -> list[Any]:
        (
            target,
            b,
            unbind_0,
            unbind_0_1,
            clone,
            unsafe_split_4,
            unsafe_split_5,
            unsafe_split_6,
            unsafe_split_7,
            mul_2,
            tanh,
            mul_3,
            unsafe_split_0_2,
            unsafe_split_1_2,
            unsafe_split_2_2,
            unsafe_split_3_2,
            mul_6,
            tanh_1,
            mul_7,
            unsafe_split_0_4,
            unsafe_split_1_4,
            unsafe_split_2_4,
            unsafe_split_3_4,
            tanh_2,
            getitem_9,
            output_1,
            dloss,
        ) = kept
        kept.clear()
        # gradient of the loss function
        doutput = torch.ops.aten.mse_loss_backward(dloss, output_1, target, 1)
        del output_1, target

        # gradient of backward_nets.py:56  return self.head(y[:, -1])
        dgetitem = torch.mm(doutput, self.head.weight)
        t = doutput.t()
        dhead_weight = accumulate_mm(sums[4], t, getitem_9)
        del getitem_9, t
        dhead_bias = accumulate(sums[5], doutput.sum(dim=0))
        doutput = torch.ops.aten.select_backward(dgetitem, [b, 3, 4], 1, -1)
        del dgetitem

        # gradient of backward_nets.py:55  lstm  y, _ = self.lstm(x)
        transpose = doutput.transpose(0, 1)
        select = transpose.select(0, 0)
        select_2 = transpose.select(0, 1)
        select_3 = transpose.select(0, 2)
        mul = select_3 * unsafe_split_3_4
        mul_13 = select_3 * tanh_2
        tanh_backward = torch.ops.aten.tanh_backward(mul, tanh_2)
        mul = tanh_backward * unsafe_split_0_4
        mul_15 = tanh_backward * unsafe_split_2_4
        mul_16 = tanh_backward * unsafe_split_1_4
        mul_17 = tanh_backward * mul_6
        sigmoid_backward = torch.ops.aten.sigmoid_backward(mul_13, unsafe_split_3_4)
        tanh_backward = torch.ops.aten.tanh_backward(mul, unsafe_split_2_4)
        sigmoid_backward_1 = torch.ops.aten.sigmoid_backward(mul_17, unsafe_split_1_4)
        sigmoid_backward_2 = torch.ops.aten.sigmoid_backward(mul_15, unsafe_split_0_4)
        cat = torch.cat([sigmoid_backward_2, sigmoid_backward_1, tanh_backward, sigmoid_backward], dim=1)
        mm = torch.mm(cat, self.lstm.weight_hh_l0)
        t = cat.t()
        mm_4 = torch.mm(t, mul_7)
        sum_ = cat.sum(dim=0)
        add = select_2 + mm
        mul = add * unsafe_split_3_2
        mul_19 = add * tanh_1
        tanh_backward = torch.ops.aten.tanh_backward(mul, tanh_1)
        add = mul_16 + tanh_backward
        mul = add * unsafe_split_0_2
        mul_21 = add * unsafe_split_2_2
        mul_22 = add * unsafe_split_1_2
        mul_23 = add * mul_2
        sigmoid_backward = torch.ops.aten.sigmoid_backward(mul_19, unsafe_split_3_2)
        tanh_backward = torch.ops.aten.tanh_backward(mul, unsafe_split_2_2)
        sigmoid_backward_4 = torch.ops.aten.sigmoid_backward(mul_23, unsafe_split_1_2)
        sigmoid_backward_5 = torch.ops.aten.sigmoid_backward(mul_21, unsafe_split_0_2)
        cat_1 = torch.cat([sigmoid_backward_5, sigmoid_backward_4, tanh_backward, sigmoid_backward], dim=1)
        mm = torch.mm(cat_1, self.lstm.weight_hh_l0)
        t = cat_1.t()
        mm_6 = torch.mm(t, mul_3)
        sum_2 = cat_1.sum(dim=0)
        add = sum_ + sum_2
        add_4 = select + mm
        add_5 = mm_4 + mm_6
        mul = add_4 * unsafe_split_7
        mul_25 = add_4 * tanh
        tanh_backward = torch.ops.aten.tanh_backward(mul, tanh)
        add_6 = mul_22 + tanh_backward
        mul = add_6 * unsafe_split_4
        mul_27 = add_6 * unsafe_split_6
        mul_28 = add_6 * unbind_0_1
        sigmoid_backward = torch.ops.aten.sigmoid_backward(mul_25, unsafe_split_7)
        tanh_backward = torch.ops.aten.tanh_backward(mul, unsafe_split_6)
        sigmoid_backward_7 = torch.ops.aten.sigmoid_backward(mul_28, unsafe_split_5)
        sigmoid_backward_8 = torch.ops.aten.sigmoid_backward(mul_27, unsafe_split_4)
        cat_2 = torch.cat([sigmoid_backward_8, sigmoid_backward_7, tanh_backward, sigmoid_backward], dim=1)
        t = cat_2.t()
        mm = torch.mm(t, unbind_0)
        sum_ = cat_2.sum(dim=0)
        dlstm_bias_hh_l0 = accumulate(sums[3], add + sum_)
        dlstm_weight_hh_l0 = accumulate(sums[1], add_5 + mm)
        stack = torch.stack([cat_2, cat_1, cat])
        dlstm_bias_ih_l0 = accumulate(sums[2], stack.sum(dim=[0, 1]))
        view = stack.reshape(-1, 16)
        t = view.t()
        unsafe_view_ = clone.reshape(-1, 4)
        dlstm_weight_ih_l0 = accumulate_mm(sums[0], t, unsafe_view_)
        return [
            dlstm_weight_ih_l0,
            dlstm_weight_hh_l0,
            dlstm_bias_ih_l0,
            dlstm_bias_hh_l0,
            dhead_weight,
            dhead_bias,
        ]
