"""A saved pipeline starts without what only a capture needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import fxpipe

X, Y = torch.ones(4, 8), torch.zeros(4, 4)
SCRIPT = """
import sys
import torch
from torch import nn
import fxpipe

torch.manual_seed(0)
pipe = fxpipe.load(sys.argv[1], nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
loss = pipe.step(torch.ones(4, 8), target=torch.zeros(4, 4), loss_fn=nn.functional.mse_loss)
print(loss.item(), *(name for name in ("torch._dynamo", "sympy") if name in sys.modules))
"""


def test_dynamo_is_not_imported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    pipe = fxpipe.compile(model, devices=2, chunks=2, schedule="1f1b")
    loss = pipe.step(X, target=Y, loss_fn=F.mse_loss)
    pipe.save(tmp_path / "saved")
    pipe.close()
    run = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "saved")], capture_output=True, text=True)
    assert run.stdout.split() == [str(loss.item())], run.stdout + run.stderr
