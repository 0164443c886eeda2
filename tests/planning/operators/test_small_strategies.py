"""The small ones are the models themselves, cut into a pipeline."""

from __future__ import annotations

import pytest

import fxpipe
from tests.helpers.marks import mostly_slow
from tests.helpers.small_strategies import SMALL
from tests.helpers.transparency import assert_same, build, inputs, plain, step


@pytest.mark.parametrize("name", mostly_slow(SMALL, ("alexnet", "resnet", "rnnlm").__contains__))
def test_a_pipeline_is_the_model(name: str) -> None:
    case = SMALL[name]
    model, twin = build(case), build(case)
    pipe = fxpipe.compile(twin, devices=3, chunks=2)
    wanted = plain(case, model, *inputs(case, 5), chunks=2)
    assert_same(step(case, twin, pipe, *inputs(case, 5)), wanted)
    assert list(pipe.state_dict()) == list(model.state_dict())
    pipe.close()
