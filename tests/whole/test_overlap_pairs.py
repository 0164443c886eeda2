"""Overlapped pairs: a step in which forwards and backwards share functions has the model's gradients and draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.engines.common.generated_backward import GeneratedBackward
from fxpipe.errors import PlanError
from fxpipe.pipe.build.build import predict
from fxpipe.pipe.options.check_options import check
from fxpipe.pipe.options.compile_options import Options, device_labels, stage_devices
from tests.helpers.models import MODELS
from tests.helpers.transparency import assert_same, build, inputs
from tests.whole.test_steps import BATCHES, captured, one_step, reference, stepped, steps_of

CHUNKS = 5


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the methods of pairs that have run."""
    run, found = GeneratedBackward.forward_beside_backward, list[str]()

    def noted(own: GeneratedBackward, args: Any, other: Any, method: str, *rest: Any) -> Any:
        found.append(method)
        return run(own, args, other, method, *rest)

    monkeypatch.setattr(GeneratedBackward, "forward_beside_backward", noted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "checkpoint"),
    [
        ("tied weight", "1f1b-late", "never"),
        ("batch norm", "dualpipe-v", "except_last"),
        ("dropout", "1f1b", "always"),
        ("own function", "dualpipe-v", "never"),
    ],
)
def test_steps_in_pairs_are_the_models(name: str, schedule: str, checkpoint: str, pairs: list[str]) -> None:
    case = stepped(MODELS[name])
    model, twin, labels = build(case), build(case), stage_devices(device_labels(2), schedule, None)
    graph = captured(case, build(case), BATCHES[0], CHUNKS)
    options = Options(labels, CHUNKS, schedule=schedule, checkpoint=checkpoint, backward="code", overlap_pairs=True)
    with steps_of(graph, twin, options, inputs(case, BATCHES[0])) as step:
        for batch in BATCHES:
            assert_same(one_step(case, twin, batch, step), reference(case, model, batch, CHUNKS))
    assert pairs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(10, 8), nn.Dropout(0.2)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = x + self.drop(torch.relu(layer(x)))
        return x


def made(**options: Any) -> tuple[nn.Module, fxpipe.Pipe]:
    torch.manual_seed(0)
    model = Net().double()
    return model, fxpipe.compile(model, **{"devices": 2, "chunks": 6, "backward": "code", **options})


def take(pipe: fxpipe.Pipe, words: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(1)
    return pipe.step(words, target=torch.zeros(*words.shape, 8, dtype=torch.float64), loss_fn=F.mse_loss, **options)


def data(rows: int = 12) -> Tensor:
    return torch.arange(rows * 3).reshape(rows, 3) % 10


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"schedule": "dualpipe-v"}, marks=pytest.mark.slow),
        {"schedule": "1f1b", "devices": 3, "replicas": (2, 1)},
    ],
)
def test_draws_losses_and_gradients_are_those_of_two_actions(options: dict[str, Any], pairs: list[str]) -> None:
    (model, pipe), (twin, other) = made(overlap_pairs=True, **options), made(**options)
    for rows in (12, 2, 12):
        torch.testing.assert_close(take(pipe, data(rows)), take(other, data(rows)), rtol=1e-12, atol=0)
    assert pairs
    for one, same in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, same.grad, rtol=1e-9, atol=1e-12)
    assert f"overlapped pairs: {len(pipe.schedule.pairs)} of a forward and a backward" in pipe.explain()
    assert "forward_beside_backward" in pipe.files["stage0.py"]
    assert "overlapped pairs" not in other.explain()
    pipe.close()
    other.close()


@pytest.mark.slow
def test_timed_steps_errors_and_saved_packages(tmp_path: Any, pairs: list[str]) -> None:
    """Timed steps run the actions one by one, with the memory that was predicted for pairs; an error has the line of
    its own micro-batch; and a package runs in pairs, in one process."""
    _, pipe = made(overlap_pairs=True, schedule="1f1b", checkpoint="never")
    wanted = take(pipe, data())
    ran = len(pairs)
    torch.testing.assert_close(take(pipe, data(), timeline=True), wanted)
    assert len(pairs) == ran > 0
    assert pipe.timeline.high_water == predict(pipe.build, 6).high_water
    bad = data()
    bad[-1] = 99
    with pytest.raises(IndexError) as caught:
        take(pipe, bad)
    assert any("stage 0, micro-batch 5, at test_overlap_pairs.py" in note for note in caught.value.__notes__)
    pipe.save(tmp_path)
    pipe.close()
    pairs.clear()
    loaded = fxpipe.load(tmp_path, made()[0])
    torch.testing.assert_close(take(loaded, data()), wanted)
    assert pairs
    loaded.close()


def test_what_does_not_go_with_pairs_is_refused() -> None:
    for options, message in (
        ({"backward": "autograd"}, "autograd computes backward: add backward='code'"),
        ({"compile_stages": True}, "overlap_pairs does not go with compile_stages yet"),
        ({"schedule": "F0 F1+ B0 B1 \n F0 F1 B0 B1", "chunks": 2}, "leave out each \\+, and write overlap_pairs=True"),
    ):
        with pytest.raises(PlanError, match=message):
            made(**{"overlap_pairs": True, **options})
    with pytest.raises(PlanError, match="overlap_pairs does not go with devices that are processes yet"):
        check(Options(("cpu:0", "cpu:1"), 4, backward="code", overlap_pairs=True, ranks=True))


class Strided(nn.Linear):
    """as_strided depends on the layout of memory, so that autograd computes its gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.as_strided((8, 8), (8, 1)), self.bias)


@pytest.mark.slow
def test_a_stage_without_code_is_in_no_pair_and_explain_says_so(pairs: list[str]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), Strided(8, 8), nn.Linear(8, 8)).double()
    pipe = fxpipe.compile(net, 2, 6, schedule="1f1b", backward="code", overlap_pairs=True, cut=["2"])
    x = torch.randn(12, 8, dtype=torch.float64)
    pipe.step(x, target=x, loss_fn=F.mse_loss)
    assert "stage 1 by autograd: as_strided depends on the layout of memory" in pipe.explain()
    assert "overlapped pairs: none of stage 1, without backward as code" in pipe.explain()
    assert set(pairs) == {"forward_beside_backward_0"}
    pipe.close()
