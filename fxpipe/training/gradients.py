"""Operations of a training loop on all gradients at once, when each process has only some of them.

In one process they do the same as torch's own. Over ranks, each rank has the gradients of its own stages: a norm is
computed from the norms of all ranks, and an infinity on one rank makes all of them skip the step. A parameter that
several stages or replicas use counts once.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_

from fxpipe.pipe.drop_in_module import DropInModule
from fxpipe.torch_internals.gradient_norms import total_norm


def clip_grad_norm_(
    pipe: DropInModule,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients of all parameters down so that their norm, over all stages, is at most `max_norm`. Returns
    the norm before scaling. For a pipe in one process it does the same as `torch.nn.utils.clip_grad_norm_`; of several
    ranks, all must call it.

    - `pipe`: the pipe itself, not its parameters.
    - `norm_type`: the order of the norm: 2.0, or `math.inf` for the largest absolute value, or another number.
    - `error_if_nonfinite`: whether a norm that is infinite or not a number is an error.
    - `foreach`: whether torch works on many tensors in one call; None: where torch finds that faster.

    Raises RuntimeError, on every rank, if the norm is infinite or not a number and `error_if_nonfinite` is true.

    >>> import torch, fxpipe
    >>> pipe = fxpipe.compile(torch.nn.Linear(2, 1), devices=1, chunks=1)
    >>> pipe.model.weight.grad = torch.tensor([[3.0, 4.0]])
    >>> fxpipe.clip_grad_norm_(pipe, 1.0), pipe.model.weight.grad
    (tensor(5.), tensor([[0.6000, 0.8000]]))
    """
    parameters = [parameter for parameter in pipe.parameters() if parameter.grad is not None]
    counted = {id(tensor) for tensor in pipe.own_tensors().values()}
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None and id(parameter) in counted]
    gradients = [grad for one in gradients if (grad := _part(pipe, one)).numel()]
    here = total_norm(gradients, norm_type, False, foreach)
    here = here.full_tensor() if isinstance(here, DTensor) else here
    norms = pipe.collect((float(here), here.dtype if gradients else None), "clip_grad_norm_")
    if len(norms) > 1:  # with the dtype that the norm of all gradients would have in one process
        dtypes = [dtype for _, dtype in norms if dtype is not None]
        dtype = reduce(torch.promote_types, dtypes) if dtypes else here.dtype
        whole = here.new_tensor(together([norm for norm, _ in norms], norm_type), dtype=dtype)
    else:
        whole = here
    if error_if_nonfinite and not whole.isfinite():
        raise RuntimeError(f"the norm of order {norm_type} of all gradients is {float(whole)}, so they are not clipped")
    if parameters:
        clip_grads_with_norm_(parameters, max_norm, whole, foreach)
    return whole


def _part(pipe: DropInModule, gradient: Tensor) -> Tensor:
    """Of a gradient that ranks of the pipe itself have in parts, this rank's part: the others count theirs."""
    if isinstance(gradient, DTensor):
        group = dist.get_process_group_ranks(pipe.world.group)
        if set(gradient.device_mesh.mesh.flatten().tolist()) <= set(group):
            return gradient.to_local()
    return gradient


def together(norms: list[float], norm_type: float) -> float:
    """The norm of a vector, from the norms of its parts.

    >>> together([3.0, 4.0], 2), together([3.0, 4.0], math.inf)
    (5.0, 4.0)
    """
    if not all(map(math.isfinite, norms)):
        return math.nan if any(map(math.isnan, norms)) else math.inf
    largest = max(norms)
    if math.isinf(norm_type) or largest == 0:
        return largest
    ratio: float = math.fsum((norm / largest) ** norm_type for norm in norms)
    return float(largest * ratio ** (1 / norm_type))


class GradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` for a pipe: if a gradient is infinite or not a number on any rank, all skip
    `optimizer.step()`, and all keep the same scale. For a pipe in one process it does the same as torch's own.

        scaler = fxpipe.GradScaler(pipe, "cuda")
        loss = pipe.step(x, target=y, loss_fn=loss_fn, scaler=scaler)
        scaler.unscale_(optimizer)  # if gradients are to be clipped
        fxpipe.clip_grad_norm_(pipe, 1.0)
        scaler.step(optimizer)
        scaler.update()
    """

    def __init__(self, pipe: DropInModule, device: str = "cuda", **options: Any) -> None:
        super().__init__(device, **options)
        self.pipe = pipe

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale the gradients of this rank. Returns, by device, whether any rank has an infinity or NaN."""
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found = found or {found_inf.device: found_inf}  # no gradient here: a rank whose stages are frozen
        if any(self.pipe.collect_all(any(map(bool, found.values())), "GradScaler.unscale_")):
            for each in found.values():
                each.fill_(1.0)
        return found
