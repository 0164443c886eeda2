"""Words, pipelined: 3 stages, 4 micro-batches, all but the last recomputed in backward.

    clock     0   1   2   3   4   5
    cuda:0   F0  F1  F2  F3
    cuda:1       F0  F1  F2  F3
    cuda:2           F0  F1  F2  F3

F1 is the forward of micro-batch 1. Backward walks the grid from right to left: on each device the later
micro-batch goes first. Autograd would not know that by itself: a token, a tensor without elements, goes from
one micro-batch to the next.
"""

from fxpipe.engines.local.forward_engine import Batches, Pipeline
from fxpipe.runtime import Draws, checkpoint, copy, join, wait


class Scheduler(Pipeline):
    devices = ("cuda:0", "cuda:1", "cuda:2")
    inputs = (("ids", 0),)
    outputs = (("linear_2", 0, None),)
    random = True

    def lend(self, m: Batches) -> None:
        # embed.weight: stage 0 owns it, stage 2 uses it too; their gradients add up
        m.lent.embed_weight_for_2 = m.lend(2, self.stages[0].embed.weight)

    # stage 0, cuda:0 ----------------------------------------------------------------------------------------

    def ready_0(self, m: Batches, i: int) -> None:
        m[i].ids = copy(None, self.streams[0, i], self.stages[0].device, m[i].ids)
        m[i].ids = wait(m.compute[0], self.streams[0, i], m[i].ids)

    def compute_0(self, m: Batches, i: int) -> None:
        if m.grad and i < m.last:
            # all micro-batches but the last are computed again in backward
            m[i].linear, m.after[0] = checkpoint(self.stages[0], (0, i), m.context, m.after[0], m[i].ids)
        else:
            m[i].linear = self.stages[0].forward(m[i].ids)
            # no input has a gradient, so the output takes the token: B(i), F(i - 1) again, B(i - 1)
            m[i].linear = join(m.after[0], m[i].linear)
        # what leaves cuda:0 may go once F(i) is done
        self.streams[0, i].wait_stream(m.compute[0])
        del m[i].ids  # used for the last time

    # stage 1, cuda:1 ----------------------------------------------------------------------------------------

    def ready_1(self, m: Batches, i: int) -> None:
        # cuda:0 -> cuda:1; the copy waits for F(i) alone
        m[i].linear = copy(self.streams[0, i], self.streams[1, i], self.stages[1].device, m[i].linear)
        m[i].linear = wait(m.compute[1], self.streams[1, i], m[i].linear)
        if m.grad and i == m.last:
            # cuda:1 runs B(i), then F(i - 1) again, then B(i - 1)
            m[i].linear = join(m.after[1], m[i].linear)

    def compute_1(self, m: Batches, i: int) -> None:
        draw = Draws(m.seed, i, self.stages[1].device)
        if m.grad and i < m.last:
            # all micro-batches but the last are computed again in backward
            m[i].linear_1, m.after[1] = checkpoint(
                self.stages[1], (1, i), m.context, m.after[1], m[i].linear, draw
            )
        else:
            m[i].linear_1 = self.stages[1].forward(m[i].linear, draw)
        # what leaves cuda:1 may go once F(i) is done
        self.streams[1, i].wait_stream(m.compute[1])
        del m[i].linear  # used for the last time

    # stage 2, cuda:2 ----------------------------------------------------------------------------------------

    def ready_2(self, m: Batches, i: int) -> None:
        # cuda:1 -> cuda:2; the copy waits for F(i) alone
        m[i].linear_1 = copy(self.streams[1, i], self.streams[2, i], self.stages[2].device, m[i].linear_1)
        m[i].linear_1 = wait(m.compute[2], self.streams[2, i], m[i].linear_1)
        if m.grad and i == m.last:
            # cuda:2 runs B(i), then F(i - 1) again, then B(i - 1)
            m[i].linear_1 = join(m.after[2], m[i].linear_1)

    def compute_2(self, m: Batches, i: int) -> None:
        if m.grad and i < m.last:
            # all micro-batches but the last are computed again in backward
            m[i].linear_2, m.after[2] = checkpoint(
                self.stages[2], (2, i), m.context, m.after[2], m[i].linear_1, m.lent.embed_weight_for_2
            )
        else:
            m[i].linear_2 = self.stages[2].forward(m[i].linear_1, m.lent.embed_weight_for_2)
        del m[i].linear_1  # used for the last time
