"""UNet, trained: 4 stages, 8 micro-batches, 1f1b, stage 0 recomputed in backward.

    clock   0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17  18  19  20  21
    cpu:0  F0  F1  F2  F3              B0  F4  B1  F5  B2  F6  B3  F7  B4      B5      B6      B7
    cpu:1      F0  F1  F2          B0  F3  B1  F4  B2  F5  B3  F6  B4  F7  B5      B6      B7
    cpu:2          F0  F1      B0  F2  B1  F3  B2  F4  B3  F5  B4  F6  B5  F7  B6      B7
    cpu:3              F0  B0  F1  B1  F2  B2  F3  B3  F4  B4  F5  B5  F6  B6  F7  B7

F1 is the forward of micro-batch 1, B1 its backward. Each device runs its row in this order: an action starts
when the one before it is done and what it takes has arrived, and waits for nothing else.

Portals, past the stages between:

    skip1  from stage 0 to stage 2
    skip2  from stage 0 to stage 2
"""

from fxpipe.engines.common.step_engine import Gradients, Step, StepScheduler


class Scheduler(StepScheduler):
    devices = ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
    inputs = (("image", 0),)
    sizes = (("b", "image", 0),)
    outputs = (("loss", None, "mean"),)
    feeds = (("image", 0), ("image", 3))
    # of each stage, what of its arguments and of its results has a gradient, and its place there
    gradients = (
        Gradients(takes={}, gives={"skip1": 0, "skip2": 1}),
        Gradients(takes={"skip2": 0}, gives={"conv2d_8": 0}),
        Gradients(takes={"skip1": 0, "skip2": 1, "conv2d_8": 2}, gives={"cat_2": 0}),
        Gradients(takes={"cat_2": 1}, gives={"loss": 0}),
    )
    loss_reduce = "mean"
    schedule = "1f1b"
    rows = """
    cpu:0  F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
    cpu:1  F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
    cpu:2  F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
    cpu:3  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
    """

    # stage 0, cpu:0 -----------------------------------------------------------------------------------------

    def forward_0(self, m: Step, i: int) -> None:
        image = m.receive(0, i, "image")
        # all but the last are computed again in backward; skipped when backward runs next
        forward = m.forward if i == m.last else m.forward_to_recompute
        skip1, skip2 = forward(0, i, image, m[i].b)
        m.send(0, i, "skip1", skip1, to=2)
        m.send(0, i, "skip2", skip2, to=1)
        m.send(0, i, "skip2", skip2, to=2)

    def backward_0(self, m: Step, i: int) -> None:
        m.recompute(0, i)  # while the gradients are on their way
        dskip1 = m.receive_gradient(0, i, "skip1", source=2)
        dskip2 = m.add(
            m.receive_gradient(0, i, "skip2", source=1), m.receive_gradient(0, i, "skip2", source=2)
        )
        m.backward(0, i, dskip1, dskip2)

    # stage 1, cpu:1 -----------------------------------------------------------------------------------------

    def forward_1(self, m: Step, i: int) -> None:
        # from stage 0
        skip2 = m.receive(1, i, "skip2")
        conv2d_8 = m.forward(1, i, skip2, m[i].b)
        m.send(1, i, "conv2d_8", conv2d_8, to=2)

    def backward_1(self, m: Step, i: int) -> None:
        dconv2d_8 = m.receive_gradient(1, i, "conv2d_8", source=2)
        dskip2 = m.backward(1, i, dconv2d_8)
        m.send_gradient(1, i, "skip2", dskip2, to=0)

    # stage 2, cpu:2 -----------------------------------------------------------------------------------------

    def forward_2(self, m: Step, i: int) -> None:
        # from stage 0, stage 1
        skip1, skip2, conv2d_8 = m.receive(2, i, "skip1", "skip2", "conv2d_8")
        cat_2 = m.forward(2, i, skip1, skip2, conv2d_8, m[i].b)
        m.send(2, i, "cat_2", cat_2, to=3)

    def backward_2(self, m: Step, i: int) -> None:
        dcat_2 = m.receive_gradient(2, i, "cat_2", source=3)
        dskip1, dskip2, dconv2d_8 = m.backward(2, i, dcat_2)
        m.send_gradient(2, i, "skip1", dskip1, to=0)
        m.send_gradient(2, i, "skip2", dskip2, to=0)
        m.send_gradient(2, i, "conv2d_8", dconv2d_8, to=1)

    # stage 3, cpu:3 -----------------------------------------------------------------------------------------

    def forward_3(self, m: Step, i: int) -> None:
        # from the batch, stage 2
        image, cat_2 = m.receive(3, i, "image", "cat_2")
        loss = m.forward(3, i, image, cat_2, m[i].b)
        m[i].loss = loss.detach()

    def backward_3(self, m: Step, i: int) -> None:
        dloss = m.root(3, i, "loss")
        dcat_2 = m.backward(3, i, dloss)
        m.send_gradient(3, i, "cat_2", dcat_2, to=2)
