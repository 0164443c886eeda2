"""Any strategy of the space trains and evaluates the model: outputs, loss and all gradients are the plain model's.

A model is captured once; then strategies come one after the other, cut in sample, attribute and parameter dimensions,
on 1 to 4 devices, run by a call of the pipe and autograd or by a step in one of several schedules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.api.cli.main import main
from fxpipe.api.search import operators_of
from fxpipe.errors import PlanError
from fxpipe.ir.cluster.published_clusters import preset
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.operators.strategy import Config, Strategy
from fxpipe.pipe.build.apply_strategy import StrategyPlacement
from fxpipe.pipe.options.compile_options import device_labels
from fxpipe.pipe.results.searched import Searched
from fxpipe.planning.operators.expert_strategies import data_parallel, krizhevsky, scattered
from tests.helpers.marks import mostly_slow, slow_in_turn
from tests.helpers.models import Case, Inputs
from tests.helpers.small_strategies import SMALL
from tests.helpers.transparency import build, inputs

TOLERANCE = 1e-9
HEAD = ("hidden", "head")
SAMPLES = 4


class Convolutional(nn.Module):
    """Small enough for hundreds of strategies: a convolution, a pool, a branch, linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.left, self.right = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.hidden, self.head = nn.Linear(36, 6), nn.Linear(6, 3)

    def forward(self, image: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.conv(image).relu(), 2)
        x = self.left(x) + self.right(x).relu()
        return self.head(self.hidden(x.flatten(1)).tanh())  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """Embeddings, a product with shared weights, a norm, what is no product at all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.mix, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.mix(self.norm(x)).relu()
        x = self.mix(x)
        return x.softmax(-1).mean(1) * 2  # type: ignore[no-any-return]


def words(batch: int) -> Inputs:
    return (torch.randint(0, 7, (batch, 5)),), {}


CASES = {
    "convolutional": Case(Convolutional, lambda batch: ((torch.randn(batch, 2, 6, 6).double(),), {}), frozenset()),
    "mixed": Case(Mixed, words, frozenset()),
    **SMALL,
}
# How many strategies each model runs, 306 in all; by default the first few.
COUNTS = {"convolutional": 60, "mixed": 60, "alexnet": 12, "rnnlm": 14, "rnntc": 12, "nmt": 8, "resnet": 3}
COUNTS |= {"inception": 6}
FIRST = {"convolutional": 15, "mixed": 15, "alexnet": 6, "rnnlm": 4, "rnntc": 4, "nmt": 2, "resnet": 1}


def loss_of(output: Tensor) -> Tensor:
    """A sum over samples, with another gradient at every element."""
    return output.sin().sum()


@dataclass
class Placing:
    """Places by the strategy that is set at the moment."""

    operators: OperatorGraph
    devices: int = 1
    strategy: Strategy = field(default_factory=lambda: Strategy(()))

    def __call__(self, graph: Graph, sizes: Mapping[str, int]) -> Placed:
        return StrategyPlacement(self.operators, self.strategy, self.devices)(graph, sizes)


class Bench:
    """A model that is captured once, and what it gives by itself."""

    def __init__(self, name: str) -> None:
        case = CASES[name]
        self.model, self.args = build(case), inputs(case, SAMPLES)[0]
        self.output = self.model(*self.args)
        loss_of(self.output).backward()
        self.wanted = {key: p.grad.clone() for key, p in self.model.named_parameters() if p.grad is not None}
        self.keys = list(self.model.state_dict())
        graphs = (operators_of(self.model, preset("p100:4"), self.args, batch) for batch in (SAMPLES, SAMPLES // 2))
        self.operators = dict(zip((1, 2), graphs, strict=True))  # by micro-batches
        self.placing = Placing(self.operators[1])
        self.pipe = fxpipe.compile(self.model, devices=4, plan=self.placing, reduce="sum")

    def set(self, strategy: Strategy, devices: int, **options: Any) -> None:
        """Let the pipe run another strategy, of the graphs that it has captured."""
        self.placing.strategy, self.placing.devices = strategy, devices
        cache = self.pipe._state.cache
        for live in cache.lives.values():
            live.close()
        cache.builds.clear()
        cache.lives.clear()
        cache.options = replace(cache.options, devices=device_labels(["cpu"] * devices), **options)

    def check(self, by_step: bool) -> None:
        """One run gives what the model does."""
        self.model.zero_grad()
        if by_step:
            loss, output = self.pipe.step(*self.args, loss_fn=loss_of, outputs=True)
        else:
            output = self.pipe(*self.args)
            loss = loss_of(output)
            loss.backward()
        torch.testing.assert_close(output, self.output, rtol=TOLERANCE, atol=TOLERANCE, check_stride=False)
        torch.testing.assert_close(loss.detach(), loss_of(self.output).detach(), rtol=TOLERANCE, atol=TOLERANCE)
        for key, parameter in self.model.named_parameters():
            wanted = self.wanted[key]
            assert parameter.grad is not None, key
            far = (parameter.grad - wanted).abs().max().item()
            assert far <= TOLERANCE * max(1e-5, wanted.abs().max().item()), f"{key} is off by {far}"
        assert list(self.pipe.state_dict()) == self.keys


@contextmanager
def bench(name: str) -> Iterator[Bench]:
    made = Bench(name)
    try:
        yield made
    finally:
        made.pipe.close()


def check_many(name: str, numbers: range) -> None:
    with bench(name) as made:
        for number in numbers:
            rng = Random(number)
            devices = rng.choice((1, 2, 3, 4))
            chunks, schedule = rng.choice((1, 2)), rng.choice(("gpipe", "1f1b", "zb-h1"))
            strategy = scattered(made.operators[chunks], devices, rng)
            checkpoint = rng.choice(("never", "never", "always"))
            made.set(strategy, devices, chunks=chunks, schedule=schedule, checkpoint=checkpoint)
            try:
                made.check(by_step=number % 3 != 1)
            except Exception as error:
                error.add_note(f"strategy {number} of {name}, {devices} devices, {chunks} chunks, {schedule}")
                raise


@pytest.mark.parametrize("name", mostly_slow(FIRST, "mixed".__eq__))
def test_random_strategies_are_exact(name: str) -> None:
    check_many(name, range(FIRST[name]))


@pytest.mark.parametrize("name", slow_in_turn(COUNTS, 3))
def test_more_random_strategies_are_exact(name: str) -> None:
    check_many(name, range(FIRST.get(name, 0), COUNTS[name]))


# What users do ---------------------------------------------------------------------------------------------------


def small() -> tuple[nn.Module, Tensor, OperatorGraph]:
    torch.manual_seed(0)
    model, x = Convolutional(), torch.randn(SAMPLES, 2, 6, 6)
    return model, x, operators_of(model, preset("p100:2"), (x,), None)


def test_a_strategy_that_was_found_trains(tmp_path: Path) -> None:
    """From its JSON file, as from the value: several steps of an optimizer are the plain model's."""
    model, x, graph = small()
    found = Searched(graph, preset("p100:2"), scattered(graph, 2, Random(3)))
    (tmp_path / "found.json").write_text(found.dump())
    plain, target = Convolutional(), torch.randint(3, (SAMPLES,))
    plain.load_state_dict(model.state_dict())
    for strategy in (found, tmp_path / "found.json"):
        pipe = fxpipe.compile(model, plan=strategy)
        assert pipe.options.devices == ("cpu:0", "cpu:1")
        optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (pipe, plain))
        for _ in range(3):
            optimizer.zero_grad()
            other.zero_grad()
            loss = pipe.step(x, target=target, loss_fn=nn.functional.cross_entropy)
            wanted = nn.functional.cross_entropy(plain(x), target)
            wanted.backward()
            torch.testing.assert_close(loss, wanted.detach())
            optimizer.step()
            other.step()
        pipe.close()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[key])


def test_state_dicts_go_round() -> None:
    """Parameters are the model's own, whole, under its keys, though devices hold parts of them."""
    model, x, graph = small()
    pipe = fxpipe.compile(model, plan=(graph, krizhevsky(graph, 2)))
    assert any(stage.parts for stage in pipe_stages(pipe, x))
    other = Convolutional()
    pipe.load_state_dict(other.state_dict())
    assert list(pipe.state_dict()) == list(other.state_dict())
    torch.testing.assert_close(pipe(x), other(x))
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.mul_(0.5)
    other.load_state_dict(pipe.state_dict())
    torch.testing.assert_close(pipe(x), other(x))
    pipe.close()


def pipe_stages(pipe: fxpipe.Pipe, x: Tensor) -> tuple[Any, ...]:
    pipe(x)
    return pipe.stages


def test_parts_that_are_frozen_have_no_gradient() -> None:
    model, x, graph = small()
    pipe = fxpipe.compile(model, plan=(graph, krizhevsky(graph, 2)))
    pipe.step(x, loss_fn=loss_of)
    wanted = model.head.weight.grad
    for parameter in model.hidden.parameters():
        parameter.requires_grad_(False)
    for run in (lambda: pipe.step(x, loss_fn=loss_of), lambda: loss_of(pipe(x)).backward()):
        model.zero_grad()
        run()
        assert model.hidden.weight.grad is None
        torch.testing.assert_close(model.head.weight.grad, wanted)
    pipe.close()


def test_train_and_eval_and_other_batches() -> None:
    model, x, graph = small()
    pipe = fxpipe.compile(model, plan=(graph, data_parallel(graph, 2)), chunks=2)
    for batch in (x, torch.cat([x, x])):
        torch.testing.assert_close(pipe(batch), model(batch))
        pipe.eval()
        with torch.no_grad():
            torch.testing.assert_close(pipe(batch), model(batch))
        pipe.train()
    pipe.close()


def test_a_saved_package_runs(tmp_path: Path) -> None:
    """A file for each device, with a class for each stage; parts are told by the files."""
    model, x, graph = small()
    pipe = fxpipe.compile(model, plan=(graph, krizhevsky(graph, 2)))
    wanted = pipe(x)
    pipe.save(tmp_path / "package")
    pipe.close()
    assert sorted(path.name for path in (tmp_path / "package").glob("device*")) == ["device0.py", "device1.py"]
    loaded = fxpipe.load(tmp_path / "package", model)
    torch.testing.assert_close(loaded(x), wanted)
    loaded.close()


def test_a_device_file(golden: Any) -> None:
    """Half of the samples through the convolutions, half of the weights of the linear layers."""
    case = SMALL["alexnet"]
    model, (x,) = build(case), inputs(case, SAMPLES)[0]
    graph = operators_of(model, preset("p100:2"), (x,), None)
    pipe = fxpipe.compile(model, plan=(graph, krizhevsky(graph, 2)))
    pipe.prepare(x)
    golden("strategies/device1.py", pipe.files["device1.py"])
    pipe.close()


def test_it_says_which_parts_run_where() -> None:
    model, x, graph = small()
    pipe = fxpipe.compile(model, plan=(graph, krizhevsky(graph, 2)))
    pipe.prepare(x)
    lines = pipe.explain().splitlines()
    assert lines[0].startswith("Convolutional: 7 stages on 2 devices, 1 micro-batch, gpipe; times estimated")
    assert {line.split()[0]: line.split()[2:] for line in lines[3:9]} == {
        "conv": ["2", "0", "1"],
        "x": ["2", "0", "1"],
        "left": ["2", "0", "1"],
        "right": ["2", "0", "1"],
        "x_1": ["2", "0", "1"],
        "flatten": ["2", "0", "1"],
    }
    assert [line.split()[:2] for line in lines if line.startswith("cpu:")] == [["cpu:0", "4"], ["cpu:1", "3"]]
    assert "part: hidden.weight_3_6, held by stage 3 on cpu:1" in lines
    assert list(pipe.trail)[:3] == ["shard", "shard_parameters", "cut"]
    assert "= getitem(hidden_weight, " in str(pipe.trail["shard"])
    assert "= getitem(hidden_weight, " not in str(pipe.trail["shard_parameters"])
    assert "f32[3, 36]  hidden.weight_3_6" in str(pipe.trail["cut"])
    assert list(pipe.trail)[-1] == "group_segments"
    assert "portal" not in pipe.explain() + "".join(pipe.files.values())
    pipe.close()


def test_a_strategy_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`fxpipe show --plan`, which says on how many devices."""
    _, _, graph = small()
    (tmp_path / "found.json").write_text(Searched(graph, preset("p100:2"), krizhevsky(graph, 2)).dump())
    (tmp_path / "net.py").write_text("from tests.pipe.build.test_apply_strategy import Convolutional\n")
    file, image = f"{tmp_path / 'net.py'}:Convolutional", f"f32[{SAMPLES}, 2, 6, 6]"
    assert main(["show", file, image, "--plan", str(tmp_path / "found.json")]) == 0
    out = capsys.readouterr().out
    assert "stages on 2 devices, 1 micro-batch" in out
    assert "----- device1.py -" in out


def test_a_pipeline_of_sharded_stages() -> None:
    """Convolutions cut between samples over two devices, the head between its weights over two others: values only go
    from the former to the latter, so these are two stages, and in 1F1B the first runs ahead."""
    with bench("convolutional") as made:
        graph = made.operators[2]
        samples, weights = data_parallel(graph, 2).configs, krizhevsky(graph, 2).configs
        configs = [
            replace(two, devices=tuple(device + 2 for device in two.devices)) if operator.name in HEAD else one
            for operator, one, two in zip(graph, samples, weights, strict=True)
        ]
        made.set(Strategy(tuple(configs)), 4, chunks=2, schedule="1f1b", checkpoint="never")
        made.check(by_step=True)
        labels = tuple(dict.fromkeys(made.pipe.build.program.devices))
        rows = dict(zip(labels, made.pipe.schedule.devices, strict=True))
        assert "".join(action.short for action in rows["cpu:1"]) == "F0F1B0B1"
        kinds = "".join(action.kind for action in rows["cpu:3"])
        each = len(kinds) // 4
        assert kinds == 2 * (each * "F" + each * "B"), "forward and backward of a micro-batch in turn"
        made.check(by_step=False)


# What is refused -------------------------------------------------------------------------------------------------


def test_a_strategy_of_another_model() -> None:
    _, x, graph = small()
    other = nn.Sequential(nn.Flatten(), nn.Linear(72, 3))
    pipe = fxpipe.compile(other, plan=(graph, data_parallel(graph, 2)))
    with pytest.raises(
        PlanError, match="the strategy is for Convolutional without an operator '1', which the model has"
    ):
        pipe(x)


def test_a_layer_of_another_size() -> None:
    model, x, graph = small()
    model.head = nn.Linear(6, 5)
    pipe = fxpipe.compile(model, plan=(graph, data_parallel(graph, 2)))
    with pytest.raises(PlanError, match="its operator 'head' puts out channel 3 P, and the model's channel 5 P"):
        pipe(x)


def test_micro_batches_that_are_too_small() -> None:
    model, x, graph = small()
    pipe = fxpipe.compile(model, plan=(graph, data_parallel(graph, 2)), chunks=4)
    with pytest.raises(PlanError, match="sample of size 1 cannot be cut into 2 parts"):
        pipe(x)


def test_a_strategy_needs_its_devices(tmp_path: Path) -> None:
    model, _, graph = small()
    strategy = data_parallel(graph, 4)
    with pytest.raises(PlanError, match="the strategy is for 4 devices, and devices names 2"):
        fxpipe.compile(model, plan=(graph, strategy), devices=2)
    with pytest.raises(PlanError, match="no plan can be read from"):
        fxpipe.compile(model, plan=tmp_path / "nothing.json")
    wrong = strategy.replace(1, Config((3, 1), (0,)))
    with pytest.raises(PlanError, match="dimensions"):
        fxpipe.compile(model, plan=(graph, wrong))


def test_an_op_that_no_strategy_knows() -> None:
    class Sorted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sort(0).values

    _, x, graph = small()
    pipe = fxpipe.compile(Sorted(), plan=(graph, data_parallel(graph, 2)))
    with pytest.raises(PlanError, match=r"test_apply_strategy.py:\d+"):
        pipe(x)
