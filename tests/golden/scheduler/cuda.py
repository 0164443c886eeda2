"""Skip, pipelined: 4 stages, 4 micro-batches.

    clock              0   1   2   3   4   5   6
    cuda:0, stage 0   F0  F1  F2  F3
    cuda:1, stage 1       F0  F1  F2  F3
    cuda:0, stage 2           F0  F1  F2  F3
    cpu:0, stage 3                F0  F1  F2  F3

F1 is the forward of micro-batch 1. Backward walks the grid from right to left: on each device the later
micro-batch goes first. Autograd would not know that by itself: a token, a tensor without elements, goes from
one micro-batch to the next.

Portals, past the stages between:

    tanh  from stage 0 to stage 3
"""

from fxpipe.engines.local.forward_engine import Batches, Pipeline
from fxpipe.runtime import copy, fork, join, wait


class Scheduler(Pipeline):
    devices = ("cuda:0", "cuda:1", "cuda:0", "cpu:0")
    inputs = (("image", 0),)
    outputs = (("mul_1", 0, None), ("sigmoid", 0, None))

    # stage 0, cuda:0 ----------------------------------------------------------------------------------------

    def ready_0(self, m: Batches, i: int) -> None:
        m[i].image = copy(None, self.streams[0, i], self.stages[0].device, m[i].image)
        m[i].image = wait(m.compute[0], self.streams[0, i], m[i].image)

    def compute_0(self, m: Batches, i: int) -> None:
        m[i].tanh = self.stages[0].forward(m[i].image)
        # what leaves cuda:0 may go once F(i) is done
        self.streams[0, i].wait_stream(m.compute[0])
        del m[i].image  # used for the last time

    # stage 1, cuda:1 ----------------------------------------------------------------------------------------

    def ready_1(self, m: Batches, i: int) -> None:
        if m.grad and i > 0:
            # cuda:1 runs B(i) before B(i - 1)
            m[i - 1].linear_1, token = fork(m[i - 1].linear_1)
        # cuda:0 -> cuda:1; the copy waits for F(i) alone
        m[i].tanh_on_cuda1 = copy(self.streams[0, i], self.streams[1, i], self.stages[1].device, m[i].tanh)
        m[i].tanh_on_cuda1 = wait(m.compute[1], self.streams[1, i], m[i].tanh_on_cuda1)
        if m.grad and i > 0:
            m[i].tanh_on_cuda1 = join(token, m[i].tanh_on_cuda1)

    def compute_1(self, m: Batches, i: int) -> None:
        m[i].linear_1 = self.stages[1].forward(m[i].tanh_on_cuda1)
        # what leaves cuda:1 may go once F(i) is done
        self.streams[1, i].wait_stream(m.compute[1])
        del m[i].tanh_on_cuda1  # used for the last time

    # stage 2, cuda:0 ----------------------------------------------------------------------------------------

    def ready_2(self, m: Batches, i: int) -> None:
        if m.grad and i > 0:
            # cuda:0 runs B(i) before B(i - 1)
            m[i - 1].mul, m[i - 1].sigmoid, token = fork(m[i - 1].mul, m[i - 1].sigmoid)
        # cuda:1 -> cuda:0; the copy waits for F(i) alone
        m[i].linear_1 = copy(self.streams[1, i], self.streams[2, i], self.stages[2].device, m[i].linear_1)
        m[i].linear_1 = wait(m.compute[2], self.streams[2, i], m[i].linear_1)
        if m.grad and i > 0:
            m[i].linear_1 = join(token, m[i].linear_1)

    def compute_2(self, m: Batches, i: int) -> None:
        m[i].mul, m[i].sigmoid = self.stages[2].forward(m[i].linear_1)
        # what leaves cuda:0 may go once F(i) is done
        self.streams[2, i].wait_stream(m.compute[2])
        del m[i].linear_1  # used for the last time

    # stage 3, cpu:0 -----------------------------------------------------------------------------------------

    def ready_3(self, m: Batches, i: int) -> None:
        if m.grad and i > 0:
            # cpu:0 runs B(i) before B(i - 1)
            m[i - 1].mul_1, token = fork(m[i - 1].mul_1)
        # cuda:0 -> cpu:0, past stage 1 and 2; the copy waits for F(i) alone
        m[i].tanh_on_cpu = copy(self.streams[0, i], self.streams[3, i], self.stages[3].device, m[i].tanh)
        del m[i].tanh
        # cuda:0 -> cpu:0; the copy waits for F(i) alone
        m[i].mul = copy(self.streams[2, i], self.streams[3, i], self.stages[3].device, m[i].mul)
        if m.grad and i > 0:
            m[i].mul, m[i].tanh_on_cpu = join(token, m[i].mul, m[i].tanh_on_cpu)

    def compute_3(self, m: Batches, i: int) -> None:
        m[i].mul_1 = self.stages[3].forward(m[i].mul, m[i].tanh_on_cpu)
        del m[i].mul, m[i].tanh_on_cpu  # used for the last time
