"""Net, trained: 3 stages, 4 micro-batches, 1f1b, all but the last recomputed in backward.

    clock   0   1   2   3   4   5   6   7   8   9  10  11
    cpu:0  F0  F1  F2          B0  F3  B1      B2      B3
    cpu:1      F0  F1      B0  F2  B1  F3  B2      B3
    cpu:2          F0  B0  F1  B1  F2  B2  F3  B3

F1 is the forward of micro-batch 1, B1 its backward. Each device runs its row in this order: an action starts
when the one before it is done and what it takes has arrived, and waits for nothing else.
"""

from fxpipe.engines.common.step_engine import Gradients, Step, StepScheduler
from fxpipe.runtime import Draws


class Scheduler(StepScheduler):
    devices = ("cpu:0", "cpu:1", "cpu:2")
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
    schedule = "1f1b"
    rows = """
    cpu:0  F0 F1 F2 B0 F3 B1 B2 B3
    cpu:1  F0 F1 B0 F2 B1 F3 B2 B3
    cpu:2  F0 B0 F1 B1 F2 B2 F3 B3
    """

    def lend(self, m: Step) -> None:
        # embed.weight: stage 0 owns it, stage 1 uses it too; their gradients add up
        m.lent.embed_weight_for_1 = m.lend(1, self.stages[0].embed.weight)

    # stage 0, cpu:0 -----------------------------------------------------------------------------------------

    def forward_0(self, m: Step, i: int) -> None:
        ids = m.receive(0, i, "ids")
        # all but the last are computed again in backward; skipped when backward runs next
        forward = m.forward if i == m.last else m.forward_to_recompute
        skip, relu = forward(0, i, ids)
        m.send(0, i, "skip", skip, to=1)
        m.send(0, i, "relu", relu, to=1)

    def backward_0(self, m: Step, i: int) -> None:
        m.recompute(0, i)  # while the gradients are on their way
        dskip = m.receive_gradient(0, i, "skip", source=1)
        drelu = m.receive_gradient(0, i, "relu", source=1)
        m.backward(0, i, dskip, drelu)

    # stage 1, cpu:1 -----------------------------------------------------------------------------------------

    def forward_1(self, m: Step, i: int) -> None:
        # from stage 0
        skip, relu = m.receive(1, i, "skip", "relu")
        draw = Draws(m.seed, i, m.stages[1].device)
        # all but the last are computed again in backward; skipped when backward runs next
        forward = m.forward if i == m.last else m.forward_to_recompute
        output = forward(1, i, skip, relu, m.lent.embed_weight_for_1, draw)
        m.send(1, i, "output", output, to=2)

    def backward_1(self, m: Step, i: int) -> None:
        m.recompute(1, i)  # while the gradients are on their way
        doutput = m.receive_gradient(1, i, "output", source=2)
        dskip, drelu = m.backward(1, i, doutput)
        m.send_gradient(1, i, "skip", dskip, to=0)
        m.send_gradient(1, i, "relu", drelu, to=0)

    # stage 2, cpu:2 -----------------------------------------------------------------------------------------

    def forward_2(self, m: Step, i: int) -> None:
        # from the batch, stage 1
        target, labels_counted, output = m.receive(2, i, "target", "labels_counted", "output")
        # all but the last are computed again in backward; skipped when backward runs next
        forward = m.forward if i == m.last else m.forward_to_recompute
        loss = forward(2, i, target, labels_counted, output)
        m[i].loss = loss.detach()

    def backward_2(self, m: Step, i: int) -> None:
        m.recompute(2, i)  # while the gradients are on their way
        dloss = m.root(2, i, "loss")
        doutput = m.backward(2, i, dloss)
        m.send_gradient(2, i, "output", doutput, to=1)
