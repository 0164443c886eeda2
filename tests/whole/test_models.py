"""The test models and the plain reference are sound: judged by the model on the whole batch, and by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.models import MODELS, Case, total
from tests.helpers.transparency import Result, Seeded, assert_same, build, differences, inputs, plain, scatter, step

SEPARABLE = [name for name, case in MODELS.items() if not case.random and not case.batch_norm and name != "counter"]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_same_at_every_make(name: str) -> None:
    case = MODELS[name]
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        results.append(plain(case, build(case), *inputs(case, 4), chunks=2))
    assert_same(*results, tol=0.0)
    assert any(gradient is not None for gradient in results[0].gradients.values())


@pytest.mark.parametrize("name", SEPARABLE)
@pytest.mark.parametrize(("batch", "chunks"), [(7, 3), (2, 8)])
def test_micro_batches_add_up_to_the_batch(name: str, batch: int, chunks: int) -> None:
    case = MODELS[name]
    model = build(case)
    whole = step(case, model, model, *inputs(case, batch))
    assert_same(plain(case, build(case), *inputs(case, batch), chunks), whole)


@pytest.mark.parametrize("name", [name for name, case in MODELS.items() if case.random])
def test_random_models_draw(name: str) -> None:
    case = MODELS[name]
    torch.manual_seed(1)
    once = plain(case, build(case), *inputs(case, 4), chunks=2)
    again = plain(case, build(case), *inputs(case, 4), chunks=2)
    assert list(differences(again, once, 1e-9))


@pytest.mark.parametrize("name", [name for name, case in MODELS.items() if not case.random])
def test_other_models_do_not_draw(name: str) -> None:
    case = MODELS[name]
    state = torch.default_generator.get_state()
    plain(case, build(case), *inputs(case, 4), chunks=2)
    assert torch.equal(state, torch.default_generator.get_state())


def test_there_are_enough_models() -> None:
    assert len(MODELS) >= 28
    assert all((case.make.__doc__ or case.make.__name__ == "<lambda>") for case in MODELS.values())


def test_micro_batches_are_even_and_larger_first() -> None:
    sizes = [part["x"].shape[0] for part in scatter({"x": torch.zeros(8, 2), "n": 3}, 3, 0)]
    assert sizes == [3, 3, 2]
    assert len(scatter(torch.zeros(2), 8, 0)) == 2


def test_random_ops_are_numbered() -> None:
    def draws(micro_batch: int) -> list[float]:
        with Seeded(5, micro_batch):
            return [torch.rand(()).item(), torch.dropout(torch.ones(50), 0.5, True).sum().item(), torch.rand(()).item()]

    first, _, third = draws(0)
    assert first != third
    assert draws(0) == draws(0) != draws(1)


def test_deferred_batch_norm_is_batch_norm_on_the_batch() -> None:
    """With one norm and nothing before it, statistics of the batch are what the model itself would have."""
    case = Case(lambda: nn.BatchNorm1d(8), MODELS["linear chain"].inputs, frozenset())
    model = build(case)
    whole = step(case, model, model, *inputs(case, 7))
    split = plain(case, build(case), *inputs(case, 7), chunks=3, deferred=True)
    assert_same(replace(split, output=whole.output, gradients=whole.gradients), whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output": (torch.ones(3), 2)}, "output is"),
        ({"output": torch.tensor([1.0, 2.0, 4.0])}, "output: float32[3], off by 2.5e-01 (absolute 1.0e+00)"),
        ({"gradients": {"w": None}}, "gradient of w: None, not float32[2]"),
        ({"gradients": {}}, "gradient of : there are [], not ['w']"),
        ({"buffers": {"n": torch.tensor([1, 3])}}, "buffer n: 1 of 2 elements differ"),
        ({"buffers": {"n": torch.tensor([1.0, 2.0])}}, "buffer n: float32[2], not int64[2]"),
    ],
)
def test_differences_are_named(change: dict[str, Any], message: str) -> None:
    wanted = Result(torch.tensor([1.0, 2.0, 3.0]), {"w": torch.ones(2)}, {"n": torch.tensor([1, 2])})
    assert_same(wanted, wanted)
    with pytest.raises(AssertionError) as caught:
        assert_same(replace(wanted, **change), wanted)
    assert message.replace("2.5e-01", "3.3e-01") in str(caught.value)


def test_total_reaches_every_tensor() -> None:
    x = torch.ones(2, requires_grad=True)
    z = torch.ones(2, dtype=torch.complex64, requires_grad=True)
    total({"a": [x, None, 3], "b": (z, torch.tensor(1))}).backward()
    assert x.grad is not None
    assert z.grad is not None
