"""A plain loop, with torch.optim and torch.amp: autocast around the call, a scaler around the loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import fxpipe
from benchmarks.integrations.script import show
from fxpipe.demo.unet import UNet


def losses(steps: int = 5) -> list[float]:
    torch.manual_seed(0)
    noisy, clean = torch.randn(16, 1, 16, 16), torch.randn(16, 1, 16, 16)
    model = UNet(8)
    pipe = fxpipe.compile(model, devices=2, chunks=4)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(pipe(noisy), clean)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.item())
    for _ in range(steps):  # the same by steps, in the order of 1F1B
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = pipe.step(noisy, target=clean, loss_fn=F.mse_loss, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.item())
    pipe.close()
    return found


if __name__ == "__main__":
    show("torch.amp", losses())
