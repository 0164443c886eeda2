"""Skip, pipelined: 4 stages, 4 micro-batches, stages 0, 2, 3 recomputed in backward.

    clock    0   1   2   3   4   5   6
    cpu:0   F0  F1  F2  F3
    cpu:1       F0  F1  F2  F3
    cpu:2           F0  F1  F2  F3
    cpu:3               F0  F1  F2  F3

F1 is the forward of micro-batch 1. Backward walks the grid from right to left: on each device the later
micro-batch goes first. Autograd would not know that by itself: a token, a tensor without elements, goes from
one micro-batch to the next.

Portals, past the stages between:

    tanh  from stage 0 to stage 3
"""

from typing import Any

from fxpipe.engines.local.forward_engine import Batches, Pipeline
from fxpipe.runtime import checkpoint, fork, join


class Scheduler(Pipeline):
    devices = ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
    inputs = (("image", 0),)
    outputs = (("mul_1", 0, None), ("sigmoid", 0, None))

    # stage 0, cpu:0 -----------------------------------------------------------------------------------------

    def compute_0(self, m: Batches, i: int) -> None:
        if m.grad and i < m.last:
            # all micro-batches but the last are computed again in backward
            m[i].tanh, m.after[0] = checkpoint(self.stages[0], (0, i), m.context, m.after[0], m[i].image)
        else:
            m[i].tanh = self.stages[0].forward(m[i].image)
            # no input has a gradient, so the output takes the token: B(i), F(i - 1) again, B(i - 1)
            m[i].tanh = join(m.after[0], m[i].tanh)
        del m[i].image  # used for the last time

    # stage 1, cpu:1 -----------------------------------------------------------------------------------------

    def ready_1(self, m: Batches, i: int) -> None:
        if m.grad and i > 0:
            # cpu:1 runs B(i) before B(i - 1)
            m[i - 1].linear_1, token = fork(m[i - 1].linear_1)
            m[i].tanh = join(token, m[i].tanh)

    def compute_1(self, m: Batches, i: int) -> None:
        m[i].linear_1 = self.stages[1].forward(m[i].tanh)

    # stage 2, cpu:2 -----------------------------------------------------------------------------------------

    def compute_2(self, m: Batches, i: int) -> None:
        if m.grad:
            # every micro-batch is computed again in backward
            m[i].mul, m[i].sigmoid, m.after[2] = checkpoint(
                self.stages[2], (2, i), m.context, m.after[2], m[i].linear_1
            )
        else:
            m[i].mul, m[i].sigmoid = self.stages[2].forward(m[i].linear_1)
        del m[i].linear_1  # used for the last time

    # stage 3, cpu:3 -----------------------------------------------------------------------------------------

    def ready_3(self, m: Batches, i: int) -> None:
        if m.grad and i == m.last:
            # cpu:3 runs B(i), then F(i - 1) again, then B(i - 1)
            m[i].mul, m[i].tanh = join(m.after[3], m[i].mul, m[i].tanh)

    def compute_3(self, m: Batches, i: int) -> None:
        if m.grad and i < m.last:
            # all micro-batches but the last are computed again in backward
            m[i].mul_1, m.after[3] = checkpoint(
                self.stages[3], (3, i), m.context, m.after[3], m[i].mul, m[i].tanh
            )
        else:
            m[i].mul_1 = self.stages[3].forward(m[i].mul, m[i].tanh)
        del m[i].mul, m[i].tanh  # used for the last time

    def gather(self, m: Batches) -> tuple[Any, ...]:
        # nothing runs after the last micro-batch: backward starts with computing it again
        for j in (2,):
            m[m.last].mul_1 = join(m.after[j], m[m.last].mul_1)
        return super().gather(m)
