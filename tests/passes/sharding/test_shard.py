"""A sharded graph computes what the graph does, for random strategies on random graphs and on the published models."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import ResNet
from fxpipe.errors import PlanError
from fxpipe.ir.graph.graph import show_op
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.operators.strategy import Config, Strategy
from fxpipe.planning.operators.reading.read_operators import read
from tests.helpers.marks import mostly_slow
from tests.helpers.random_models import GraphModel, grown
from tests.helpers.random_models import sample as sample_of
from tests.helpers.random_operator_graphs import module, network
from tests.helpers.sharded_graphs import Sample, anyhow, assert_exact, results, sample
from tests.helpers.small_strategies import SMALL
from tests.helpers.transparency import build, inputs


def assert_all_exact(made: Sample, count: int, seed: int = 0) -> None:
    random = Random(seed)
    for _ in range(count):
        devices = random.choice((1, 2, 3, 4, 8))
        assert_exact(made, anyhow(made.reading.operators, devices, random), devices)


@pytest.mark.parametrize("name", mostly_slow(SMALL, ("alexnet", "resnet", "rnnlm").__contains__))
def test_small_models(name: str) -> None:
    made = sample(build(SMALL[name]), *inputs(SMALL[name], 4)[0])
    assert_all_exact(made, 2 if name == "inception" else 4)


def test_a_network_with_batch_norm() -> None:
    """Statistics over samples and area, of which every part has some; they change once."""
    made = sample(ResNet((1,), width=4, classes=5), torch.randn(6, 3, 32, 32))
    assert_all_exact(made, 4)


@pytest.mark.parametrize("seed", mostly_slow(range(8), range(4).__contains__))
def test_random_networks(seed: int) -> None:
    made = network(seed)
    assert_all_exact(sample(module(made), *made.inputs()), 6, seed)


def test_random_graphs() -> None:
    """Of those random models that have operators, 200 strategies."""
    done = seed = 0
    while done < 50:
        seed += 1
        random = Random(seed)
        graph = grown(random.choice, changes_inputs=False)
        if any(op.random or len(op.writes) > 1 for op in graph.ops) or not any(item.type.grad for item in graph.inputs):
            continue
        try:
            reading = read(graph, {"b": 6})
        except PlanError:
            continue
        torch.manual_seed(seed)
        model, xs = GraphModel(graph), tuple(sample_of(item, 6) for item in graph.inputs)
        made = Sample(model, xs, graph, reading, 6, results(model, xs, graph))
        assert_all_exact(made, 4, seed)
        done += 1


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 5, padding=2), nn.Conv2d(4, 8, 3)
        self.fc1, self.fc2 = nn.Linear(72, 16), nn.Linear(16, 5)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(image)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        x = self.fc2(x)
        return F.cross_entropy(x, label)


def lenet() -> Sample:
    return sample(LeNet(), torch.randn(6, 1, 16, 16), torch.randint(0, 5, (6,)))


def listing(placed: Placed) -> str:
    """The ops and their devices, without the model's lines."""
    rows = [(placed.devices[op.name], show_op(op).partition("  @ ")[0]) for op in placed.graph.ops]
    return "".join(f"device {device}  {op}\n" for device, op in rows)


def test_golden(golden: Callable[[str, str], None]) -> None:
    """Samples, then the area, then channels; the classes are whole, and the loss is cut by sample again."""
    made = lenet()
    cut = {"conv1": (2, 1, 1, 1), "x": (2, 1, 1, 1), "conv2": (1, 1, 2, 1), "fc1": (1, 2), "cross_entropy": (2,)}
    configs = []
    for operator in made.reading.operators:
        degrees = cut.get(operator.name, (1,) * len(operator.output))
        configs.append(Config(degrees, (0, 1)[: max(degrees)]))
    placed = assert_exact(made, Strategy(tuple(configs)), 2)
    golden("passes/sharded.txt", listing(placed))


class LastStep(nn.Module):
    """Of its last step, nobody reads what the cell remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x[:, 0])
        return self.cell(x[:, 1], state)[0]  # type: ignore[no-any-return]


def test_what_nobody_reads_is_not_made() -> None:
    made, random = sample(LastStep(), torch.randn(4, 2, 3)), Random(0)
    for devices in (1, 2, 4, 4, 4):
        graph = assert_exact(made, anyhow(made.reading.operators, devices, random), devices).graph
        read = {name for op in graph.ops for name in op.reads} | {output.value for output in graph.outputs}
        assert [op.name for op in graph.ops if op.name not in read] == []


class Written(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y[:, 0].mul_(3)
        return y


def test_memory_with_several_names_is_refused() -> None:
    made = sample(Written(), torch.randn(6, 4))
    strategy = anyhow(made.reading.operators, 2, Random(0))
    with pytest.raises(PlanError, match=r"mul_\(.*test_shard.py:\d+  y\[:, 0\].*it writes memory that is seen as"):
        made.shard(strategy)


def test_each_part_draws_its_own_numbers() -> None:
    made = sample(nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Dropout(0.5)), torch.randn(6, 4))
    last = Config((3, 1), (0, 1, 0))
    placed = made.shard(Strategy((*[Config((1, 1), (0,))] * (len(made.reading.operators) - 1), last)))
    assert [op.draw for op in placed.graph.ops if op.random] == list(range(6))
