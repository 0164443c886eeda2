"""Net, trained: 3 stages, 4 micro-batches, zb-h1.

    clock    0   1   2   3   4   5   6   7   8   9  10  11  12  13
    cuda:0  F0  F1  F2          I0  W0  F3  I1  W1  I2  W2  I3  W3
    cuda:1      F0  F1      I0  F2  I1  W0  F3  I2  W1  I3  W2  W3
    cuda:2          F0  I0  F1  I1  F2  I2  W0  F3  I3  W1  W2  W3

F1 is the forward of micro-batch 1, I1 and W1 the two halves of its backward, for what it takes and for its
weights. Each device runs its row in this order: an action starts when the one before it is done and what it
takes has arrived, and waits for nothing else.
"""

from fxpipe.engines.common.step_engine import Gradients, Step, StepScheduler
from fxpipe.runtime import Draws


class Scheduler(StepScheduler):
    devices = ("cuda:0", "cuda:1", "cuda:2")
    inputs = (("ids", 0), ("target", 0))
    outputs = (("loss", None, "sum"),)
    # what is computed from the whole batch, and from what of it
    totals = (("labels_counted",), ("target",))
    random = True
    feeds = (("ids", 0), ("target", 2), ("labels_counted", 2))
    # of each stage, what of its arguments and of its results has a gradient, and its place there
    gradients = (
        Gradients(takes={}, gives={"skip": 0, "relu": 1}),
        Gradients(takes={"skip": 0, "relu": 1}, gives={"output": 0}),
        Gradients(takes={"output": 2}, gives={"loss": 0}),
    )
    loss_reduce = "sum"
    schedule = "zb-h1"
    rows = """
    cuda:0  F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3
    cuda:1  F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    cuda:2  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """

    def lend(self, m: Step) -> None:
        # embed.weight: stage 0 owns it, stage 1 uses it too; their gradients add up
        m.lent.embed_weight_for_1 = m.lend(1, self.stages[0].embed.weight)

    # stage 0, cuda:0 ----------------------------------------------------------------------------------------

    def forward_0(self, m: Step, i: int) -> None:
        ids = m.receive(0, i, "ids")
        skip, relu = m.forward(0, i, ids)
        m.send(0, i, "skip", skip, to=1)
        m.send(0, i, "relu", relu, to=1)

    def input_gradient_0(self, m: Step, i: int) -> None:
        dskip = m.receive_gradient(0, i, "skip", source=1)
        drelu = m.receive_gradient(0, i, "relu", source=1)
        m.input_gradient(0, i, dskip, drelu)

    def weight_gradient_0(self, m: Step, i: int) -> None:
        m.weight_gradient(0, i)

    # stage 1, cuda:1 ----------------------------------------------------------------------------------------

    def forward_1(self, m: Step, i: int) -> None:
        # from stage 0
        skip, relu = m.receive(1, i, "skip", "relu")
        draw = Draws(m.seed, i, m.stages[1].device)
        output = m.forward(1, i, skip, relu, m.lent.embed_weight_for_1, draw)
        m.send(1, i, "output", output, to=2)

    def input_gradient_1(self, m: Step, i: int) -> None:
        doutput = m.receive_gradient(1, i, "output", source=2)
        dskip, drelu = m.input_gradient(1, i, doutput)
        m.send_gradient(1, i, "skip", dskip, to=0)
        m.send_gradient(1, i, "relu", drelu, to=0)

    def weight_gradient_1(self, m: Step, i: int) -> None:
        m.weight_gradient(1, i)

    # stage 2, cuda:2 ----------------------------------------------------------------------------------------

    def forward_2(self, m: Step, i: int) -> None:
        # from the batch, stage 1
        target, labels_counted, output = m.receive(2, i, "target", "labels_counted", "output")
        loss = m.forward(2, i, target, labels_counted, output)
        m[i].loss = loss.detach()

    def input_gradient_2(self, m: Step, i: int) -> None:
        dloss = m.root(2, i, "loss")
        doutput = m.input_gradient(2, i, dloss)
        m.send_gradient(2, i, "output", doutput, to=1)

    def weight_gradient_2(self, m: Step, i: int) -> None:
        m.weight_gradient(2, i)
