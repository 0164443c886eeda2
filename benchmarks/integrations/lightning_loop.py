"""Lightning's loop: the pipe is a module like any other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import fxpipe
from benchmarks.integrations.script import need, show
from fxpipe.demo.unet import UNet


def losses(steps: int = 5) -> list[float]:
    import lightning

    class Denoise(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = fxpipe.compile(UNet(8), devices=2, chunks=4)
            self.losses: list[float] = []

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            noisy, clean = batch
            loss = F.mse_loss(self.net(noisy), clean)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    torch.manual_seed(0)
    module = Denoise()
    data = TensorDataset(torch.randn(64, 1, 16, 16), torch.randn(64, 1, 16, 16))
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=16))
    module.net.close()
    return module.losses


if __name__ == "__main__":
    need("lightning")
    show("Lightning", losses())
