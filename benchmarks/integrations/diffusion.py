"""A U-Net of diffusers, trained to take noise away."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import fxpipe
from benchmarks.integrations.script import need, show


def losses(steps: int = 3) -> list[float]:
    from diffusers import DDPMScheduler, UNet2DModel

    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )  # fmt: skip
    noise = DDPMScheduler(num_train_timesteps=100)
    pipe = fxpipe.compile(model, devices=2, chunks=4)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    found = []
    for _ in range(steps):
        images, drawn, times = torch.randn(8, 3, 16, 16), torch.randn(8, 3, 16, 16), torch.randint(100, (8,))
        loss = F.mse_loss(pipe(noise.add_noise(images, drawn, times), times).sample, drawn)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    pipe.close()
    return found


if __name__ == "__main__":
    need("diffusers")
    show("diffusers", losses())
