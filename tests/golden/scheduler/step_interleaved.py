"""Net, trained: 4 stages, 4 micro-batches, interleaved, recomputed in backward.

    clock    0    1    2    3    4    5    6    7    8    9   10   11   12   13   14   15   16   17
    cpu:0  0F0  0F1  2F0  2F1       2B0  0F2  2B1  0F3  0B0  2F2  0B1  2F3  2B2       2B3  0B2  0B3
    cpu:1       1F0  1F1  3F0  3B0  3F1  3B1  1F2  1B0  1F3  1B1  3F2  3B2  3F3  3B3  1B2  1B3

2F1 is the forward of micro-batch 1 on stage 2, 2B1 its backward. Each device runs its row in this order: an
action starts when the one before it is done and what it takes has arrived, and waits for nothing else.

Portals, past the stages between:

    skip  from stage 0 to stage 2
"""

from fxpipe.engines.common.step_engine import Gradients, Step, StepScheduler
from fxpipe.runtime import Draws


class Scheduler(StepScheduler):
    devices = ("cpu:0", "cpu:1", "cpu:0", "cpu:1")
    inputs = (("ids", 0), ("target", 0))
    outputs = (("loss", None, "sum"),)
    # what is computed from the whole batch, and from what of it
    totals = (("labels_counted",), ("target",))
    random = True
    feeds = (("ids", 0), ("target", 3), ("labels_counted", 3))
    # of each stage, what of its arguments and of its results has a gradient, and its place there
    gradients = (
        Gradients(takes={}, gives={"skip": 0, "linear": 1}),
        Gradients(takes={"linear": 0}, gives={"sin": 0}),
        Gradients(takes={"skip": 0, "sin": 1}, gives={"flatten": 0}),
        Gradients(takes={"flatten": 2}, gives={"loss": 0}),
    )
    loss_reduce = "sum"
    schedule = "interleaved"
    rows = """
    cpu:0  0F0 0F1 2F0 2F1 2B0 0F2 2B1 0F3 0B0 2F2 0B1 2F3 2B2 2B3 0B2 0B3
    cpu:1  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """

    def lend(self, m: Step) -> None:
        # embed.weight: stage 0 owns it, stage 2 uses it too; their gradients add up
        m.lent.embed_weight_for_2 = m.lend(2, self.stages[0].embed.weight)

    # stage 0, cpu:0 -----------------------------------------------------------------------------------------

    def forward_0(self, m: Step, i: int) -> None:
        ids = m.receive(0, i, "ids")
        # computed again in backward; skipped when backward runs next
        skip, linear = m.forward_to_recompute(0, i, ids)
        m.send(0, i, "skip", skip, to=2)
        m.send(0, i, "linear", linear, to=1)

    def backward_0(self, m: Step, i: int) -> None:
        m.recompute(0, i)  # while the gradients are on their way
        dskip = m.receive_gradient(0, i, "skip", source=2)
        dlinear = m.receive_gradient(0, i, "linear", source=1)
        m.backward(0, i, dskip, dlinear)

    # stage 1, cpu:1 -----------------------------------------------------------------------------------------

    def forward_1(self, m: Step, i: int) -> None:
        # from stage 0
        linear = m.receive(1, i, "linear")
        draw = Draws(m.seed, i, m.stages[1].device)
        # computed again in backward; skipped when backward runs next
        sin = m.forward_to_recompute(1, i, linear, draw)
        m.send(1, i, "sin", sin, to=2)

    def backward_1(self, m: Step, i: int) -> None:
        m.recompute(1, i)  # while the gradients are on their way
        dsin = m.receive_gradient(1, i, "sin", source=2)
        dlinear = m.backward(1, i, dsin)
        m.send_gradient(1, i, "linear", dlinear, to=0)

    # stage 2, cpu:0 -----------------------------------------------------------------------------------------

    def forward_2(self, m: Step, i: int) -> None:
        # from stage 0, stage 1
        skip, sin = m.receive(2, i, "skip", "sin")
        # computed again in backward; skipped when backward runs next
        flatten = m.forward_to_recompute(2, i, skip, sin, m.lent.embed_weight_for_2)
        m.send(2, i, "flatten", flatten, to=3)

    def backward_2(self, m: Step, i: int) -> None:
        m.recompute(2, i)  # while the gradients are on their way
        dflatten = m.receive_gradient(2, i, "flatten", source=3)
        dskip, dsin = m.backward(2, i, dflatten)
        m.send_gradient(2, i, "skip", dskip, to=0)
        m.send_gradient(2, i, "sin", dsin, to=1)

    # stage 3, cpu:1 -----------------------------------------------------------------------------------------

    def forward_3(self, m: Step, i: int) -> None:
        # from the batch, stage 2
        target, labels_counted, flatten = m.receive(3, i, "target", "labels_counted", "flatten")
        # computed again in backward; skipped when backward runs next
        loss = m.forward_to_recompute(3, i, target, labels_counted, flatten)
        m[i].loss = loss.detach()

    def backward_3(self, m: Step, i: int) -> None:
        m.recompute(3, i)  # while the gradients are on their way
        dloss = m.root(3, i, "loss")
        dflatten = m.backward(3, i, dloss)
        m.send_gradient(3, i, "flatten", dflatten, to=2)
