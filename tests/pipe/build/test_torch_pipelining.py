"""Our stages as torch's: a chain that relays what skips, with the model's own gradients. (In tests/whole/ranks, torch's
schedules drive them.)"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.errors import FxpipeError, PlanError
from fxpipe.pipe.build.torch_pipelining import chain_stages
from tests.helpers.models import MODELS

NAMES = ["set item", "numbers", "tied module", "batch norm", "pass through", "class token", "optional inputs"]


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_of_stages_is_the_model(name: str, tmp_path: Path) -> None:
    """And what crosses is what torch was told."""
    case = MODELS[name]
    model = case.make().double()
    plain, (args, kwargs) = copy.deepcopy(model), case.inputs(4)
    pipe = fxpipe.compile(model, devices=3, chunks=1, **case.options)
    pipe.prepare(*args, **kwargs)
    given: Any = args
    for stage, _, after in chain_stages(model, pipe.build, tmp_path, range(3), torch.device("cpu")):
        given = stage(*given, **kwargs)
        crossed = given if isinstance(given, tuple) else (given,)
        assert [(x.shape, x.dtype, x.requires_grad) for x in crossed] == [
            (x.shape, x.dtype, x.requires_grad) for x in after
        ]
        assert stage.state_dict().keys() <= plain.state_dict().keys()
    case.loss(stage.made.result(*crossed)).backward()
    case.loss(plain(*args, **kwargs)).backward()
    for (key, found), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-9, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}")
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
    pipe.close()


def test_what_no_chain_can_do() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(4, 4)
    pipe = fxpipe.compile(model, devices=2, chunks=2)
    with pytest.raises(FxpipeError, match="nothing is compiled yet"):
        pipe.torch_stages([0])
    with pytest.raises(FxpipeError, match="it is not decided yet which stage has what"):
        pipe.materialize(stages=[0])
    pipe.step(x, target=x, loss_fn=F.mse_loss)
    with pytest.raises(FxpipeError, match=r"compiled for step\(\), in which the loss is part of the last stage"):
        pipe.torch_stages([0])
    pipe(x)
    with pytest.raises(PlanError, match="there is no stage 2: the pipe has stages 0 to 1"):
        pipe.torch_stages([2])
    pipe.close()
    pipe = fxpipe.compile(model.to("meta"), devices=2, chunks=2, example_inputs=x)
    with pytest.raises(
        FxpipeError, match=r"0.weight, of stage 0, is on the meta device; call pipe.materialize\(stages"
    ):
        pipe.torch_stages([0])
    pipe.close()
