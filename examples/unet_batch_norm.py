"""A U-Net with long skips and BatchNorm, which removes noise from handwritten digits (needs scikit-learn).

python examples/unet_batch_norm.py --steps 60
"""

from __future__ import annotations

import argparse
import copy
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.demo.run import digits


# model
class Block(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(outside)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    """[b, 1, 16, 16] noisy in, the same clean out."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        c = channels
        self.down1, self.down2 = Block(1, c), Block(c, 2 * c)
        self.middle = Block(2 * c, 2 * c)
        self.up2, self.up1 = Block(4 * c, c), Block(2 * c, c)
        self.head = nn.Conv2d(c, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        skip1 = self.down1(image)
        skip2 = self.down2(F.max_pool2d(skip1, 2))
        x = self.middle(F.max_pool2d(skip2, 2))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2), skip2], dim=1))
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2), skip1], dim=1))
        return image - self.head(x)


# data
def pairs() -> tuple[Tensor, Tensor]:
    """[1797, 1, 16, 16] noisy and clean images."""
    clean = F.interpolate(digits()[:, None].float() / 16, scale_factor=2)
    return clean + 0.3 * torch.randn_like(clean), clean


# train
def train(steps: int, picture: Path | None) -> None:
    torch.manual_seed(0)
    noisy, clean = pairs()
    model = UNet()
    plain = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pipe = fxpipe.compile(model, devices=4, chunks=4, schedule="1f1b", deferred_batch_norm=True)
        pipe.step(noisy[:64], target=clean[:64], loss_fn=F.mse_loss)
    print(f"warnings: {len(said)}")
    for line in pipe.explain().splitlines():
        if line.startswith("portal"):
            print(line)
    if picture is not None:
        pipe.draw(picture)
    pipe.zero_grad()
    model.load_state_dict(plain.state_dict())  # both begin alike, statistics included

    runs = {"pipe": pipe, "plain": plain}
    optimizers = {name: torch.optim.Adam(run.parameters(), lr=3e-3) for name, run in runs.items()}
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        chosen = torch.randint(1500, (64,), generator=generator)
        x, y = noisy[chosen], clean[chosen]
        losses = {"pipe": pipe.step(x, target=y, loss_fn=F.mse_loss), "plain": F.mse_loss(plain(x), y)}
        losses["plain"].backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step:3}  pipe {losses['pipe'].item():.4f}  plain {losses['plain'].item():.4f}")

    # evaluate
    x, y = noisy[1500:], clean[1500:]
    print(f"noisy images are off by {F.mse_loss(x, y).item():.4f}")
    for name, run in runs.items():
        run.eval()
        with torch.no_grad():
            print(f"{name} leaves {F.mse_loss(run(x), y).item():.4f}")
    pipe.close()


# end
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--picture", type=Path, help="draw the stages into this file: .svg, .html or .png")
    options = parser.parse_args()
    torch.set_num_threads(1)
    train(options.steps, options.picture)


if __name__ == "__main__":
    main()
