"""Programs whose stages have their backward as code, of models that are captured here."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.capture import StepCapture
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.program.program import Program
from fxpipe.passes import lower
from fxpipe.runtime.microbatch import split_sizes


def coded(model: nn.Module, x: Tensor, cut: int | None = None, checkpoint: str = "never") -> Program:
    """The program of a step whose loss is the mean of the squared output, of one stage, or cut before op number `cut`;
    the batch is in two micro-batches. `checkpoint`: of each stage."""
    stepper = StepCapture(model, sizes=lambda rows: split_sizes(rows, 2))
    graph = stepper.capture((x,), {}, torch.zeros_like(model(x)), loss_fn=F.mse_loss)
    names = tuple(op.name for op in graph.ops)
    parts = [names] if cut is None else [names[:cut], names[cut:]]
    stages = tuple(StagePlan(part, f"cpu:{index}", checkpoint) for index, part in enumerate(parts))
    return lower(graph, Plan(graph.model, stages, 2), backward="code", sizes={"b": len(x) // 2})
