"""Plan a model for a cluster that you do not have: no GPU, no weights.

python examples/plan_cluster.py
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe


# model
class Vgg(nn.Module):
    """[b, 3, 224, 224] images in, [b, 1000] scores out. Most of the time goes into convolutions at the front, most of
    the parameters are in linear layers at the end."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 64, 128, 256, 512, 512)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.large = nn.Linear(512 * 7 * 7, 4096)
        self.middle = nn.Linear(4096, 4096)
        self.last = nn.Linear(4096, 1000)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.max_pool2d(F.relu(conv(x)), 2)
        x = F.relu(self.large(x.flatten(1)))
        return self.last(F.relu(self.middle(x)))


# plan
def main() -> None:
    torch.set_num_threads(1)
    with torch.device("meta"):  # shapes, and no memory
        model, images = Vgg(), torch.zeros(32, 3, 224, 224)
    planned = fxpipe.plan(model, "C", batch_size=1024, example_inputs=images, time_limit=120)
    print(planned)
    for planner in ("data parallel", "dapple", "straight"):
        other = fxpipe.plan(model, "C", batch_size=1024, example_inputs=images, planner=planner)
        print(f"{planner}: {other.seconds / planned.seconds:.2f} times as long")
    planned.save("plan_C.json")
    planned.draw("plan_C.svg")


# end
if __name__ == "__main__":
    main()
