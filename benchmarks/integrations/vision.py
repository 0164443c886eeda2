"""A timm model, trained by steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import fxpipe
from benchmarks.integrations.script import need, show


def losses(steps: int = 5) -> list[float]:
    import timm

    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=10)
    images, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
    pipe = fxpipe.compile(model, devices=2, chunks=2, schedule="1f1b")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01, momentum=0.9)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        found.append(pipe.step(images, target=labels, loss_fn=F.cross_entropy).item())
        optimizer.step()
    pipe.close()
    return found


if __name__ == "__main__":
    need("timm")
    show("timm", losses())
