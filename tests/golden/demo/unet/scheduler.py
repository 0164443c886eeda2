"""UNet, pipelined: 4 stages, 8 micro-batches, all but the last recomputed in backward.

    clock    0   1   2   3   4   5   6   7   8   9  10
    cpu:0   F0  F1  F2  F3  F4  F5  F6  F7
    cpu:1       F0  F1  F2  F3  F4  F5  F6  F7
    cpu:2           F0  F1  F2  F3  F4  F5  F6  F7
    cpu:3               F0  F1  F2  F3  F4  F5  F6  F7

F1 is the forward of micro-batch 1. Backward walks the grid from right to left: on each device the later
micro-batch goes first. Autograd would not know that by itself: a token, a tensor without elements, goes from
one micro-batch to the next.

Portals, past the stages between:

    skip1  from stage 0 to stage 2
    skip2  from stage 0 to stage 2
"""

from fxpipe.engines.local.forward_engine import Batches, Pipeline
from fxpipe.runtime import checkpoint, join


class Scheduler(Pipeline):
    devices = ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
    inputs = (("image", 0),)
    outputs = (("sub", 0, None),)

    # stage 0, cpu:0 -----------------------------------------------------------------------------------------

    def compute_0(self, m: Batches, i: int) -> None:
        if m.grad and i < m.last:
            # all micro-batches but the last are computed again in backward
            m[i].skip1, m[i].skip2, m.after[0] = checkpoint(
                self.stages[0], (0, i), m.context, m.after[0], m[i].image
            )
        else:
            m[i].skip1, m[i].skip2 = self.stages[0].forward(m[i].image)
            # no input has a gradient, so the output takes the token: B(i), F(i - 1) again, B(i - 1)
            m[i].skip1, m[i].skip2 = join(m.after[0], m[i].skip1, m[i].skip2)

    # stage 1, cpu:1 -----------------------------------------------------------------------------------------

    def ready_1(self, m: Batches, i: int) -> None:
        if m.grad and i == m.last:
            # cpu:1 runs B(i), then F(i - 1) again, then B(i - 1)
            m[i].skip2 = join(m.after[1], m[i].skip2)

    def compute_1(self, m: Batches, i: int) -> None:
        if m.grad and i < m.last:
            # all micro-batches but the last are computed again in backward
            m[i].conv2d_8, m.after[1] = checkpoint(self.stages[1], (1, i), m.context, m.after[1], m[i].skip2)
        else:
            m[i].conv2d_8 = self.stages[1].forward(m[i].skip2)

    # stage 2, cpu:2 -----------------------------------------------------------------------------------------

    def ready_2(self, m: Batches, i: int) -> None:
        if m.grad and i == m.last:
            # cpu:2 runs B(i), then F(i - 1) again, then B(i - 1)
            m[i].skip1, m[i].skip2, m[i].conv2d_8 = join(m.after[2], m[i].skip1, m[i].skip2, m[i].conv2d_8)

    def compute_2(self, m: Batches, i: int) -> None:
        if m.grad and i < m.last:
            # all micro-batches but the last are computed again in backward
            m[i].cat_2, m.after[2] = checkpoint(
                self.stages[2], (2, i), m.context, m.after[2], m[i].skip1, m[i].skip2, m[i].conv2d_8
            )
        else:
            m[i].cat_2 = self.stages[2].forward(m[i].skip1, m[i].skip2, m[i].conv2d_8)
        del m[i].skip1, m[i].skip2, m[i].conv2d_8  # used for the last time

    # stage 3, cpu:3 -----------------------------------------------------------------------------------------

    def ready_3(self, m: Batches, i: int) -> None:
        if m.grad and i == m.last:
            # cpu:3 runs B(i), then F(i - 1) again, then B(i - 1)
            m[i].cat_2 = join(m.after[3], m[i].cat_2)

    def compute_3(self, m: Batches, i: int) -> None:
        if m.grad and i < m.last:
            # all micro-batches but the last are computed again in backward
            m[i].sub, m.after[3] = checkpoint(
                self.stages[3], (3, i), m.context, m.after[3], m[i].image, m[i].cat_2
            )
        else:
            m[i].sub = self.stages[3].forward(m[i].image, m[i].cat_2)
        del m[i].image, m[i].cat_2  # used for the last time
