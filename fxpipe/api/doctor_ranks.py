"""What each of the two processes of `fxpipe doctor` does: `python -m fxpipe.api.doctor_ranks add` or `step`."""

from __future__ import annotations

import copy
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from .compile import compile
from .doctor import WAIT
from .self_check import small_model


def main(kind: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=WAIT))
    try:
        if kind == "add":
            one = torch.ones(())
            dist.all_reduce(one)
            if one != dist.get_world_size():
                raise RuntimeError(f"the sum of {dist.get_world_size()} ones is {one.item()}")
        else:
            step()
    finally:
        dist.destroy_process_group()


def step() -> None:
    """A step of a small model. Raises AssertionError if the loss or the gradients of this rank are not the plain
    model's."""
    model = small_model().double()
    del model[2]  # dropout: the plain model would draw other numbers
    plain = copy.deepcopy(model)
    x = torch.linspace(-1, 1, 16 * 32, dtype=torch.float64).sin().view(16, 32)
    y = torch.zeros(16, 8, dtype=torch.float64)
    pipe = compile(model, 2, 4, schedule="1f1b", example_inputs=x)
    loss = pipe.step(x, target=y, loss_fn=nn.MSELoss())
    wanted = nn.MSELoss()(plain(x), y)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    grads = {name: p.grad for name, p in plain.named_parameters()}
    for name, p in pipe.named_parameters():
        torch.testing.assert_close(p.grad, grads[name])
    pipe.close()


if __name__ == "__main__":
    main(sys.argv[1])
