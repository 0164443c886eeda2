"""The scheduler of steps, as text. What it computes is proved by numbers, for every model and schedule, elsewhere."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.capture import StepCapture
from fxpipe.codegen.package.package_files import package
from fxpipe.codegen.scheduler.forward_scheduler import emit_scheduler
from fxpipe.codegen.scheduler.step_scheduler import emit_steps
from fxpipe.codegen.stage.stage_file import emit_totals
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.program.program import Program
from fxpipe.ir.program.whole_batch import WholeBatch
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.passes import lower
from fxpipe.schedules.make_schedule import make
from tests.helpers.marks import mostly_slow

Golden = Callable[[str, str], None]


class Net(nn.Module):
    """A skip past the stage between, dropout, and a weight that the last layer uses again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.middle = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, ids: Tensor) -> Tensor:
        skip = torch.tanh(self.embed(ids))
        h = self.drop(torch.relu(self.middle(skip)))
        h = torch.sin(h) + skip
        return F.linear(h, self.embed.weight)


def token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean over the tokens that count: of another number in each micro-batch."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def made(
    schedule: str, devices: Sequence[str], chunks: int, checkpoint: str = "never"
) -> tuple[Program, Schedule, Plan, WholeBatch]:
    """The net and its loss in stages of about as many ops, and a schedule for them."""
    torch.manual_seed(0)
    ids = torch.zeros(8, 5, dtype=torch.long)
    graph = StepCapture(Net()).capture((ids,), {}, target=ids.clone(), loss_fn=token_loss)
    names = [op.name for op in graph.ops]
    bounds = [len(names) * j // len(devices) for j in range(len(devices) + 1)]
    stages = [
        StagePlan(tuple(names[a:b]), device, checkpoint)
        for a, b, device in zip(bounds, bounds[1:], devices, strict=False)
    ]
    totals = None
    if graph.totals is not None:
        whole = StagePlan(tuple(op.name for op in graph.totals.ops), devices[-1], "never")
        totals = lower(graph.totals, Plan("Net", (whole,), 1))
    plan = Plan("Net", tuple(stages), chunks)
    return lower(graph, plan), make(schedule, devices, chunks), plan, WholeBatch(totals)


def test_golden_of_1f1b(golden: Golden) -> None:
    golden("scheduler/step_1f1b.py", emit_steps(*made("1f1b", ("cpu:0", "cpu:1", "cpu:2"), 4, "except_last")))


def test_golden_of_a_split_backward(golden: Golden) -> None:
    golden("scheduler/step_zb.py", emit_steps(*made("zb-h1", ("cuda:0", "cuda:1", "cuda:2"), 4)))


def test_golden_of_several_stages_on_a_device(golden: Golden) -> None:
    golden("scheduler/step_interleaved.py", emit_steps(*made("interleaved", ("cpu:0", "cpu:1") * 2, 4, "always")))


@pytest.mark.parametrize("label", ['cpu:0""";bad();"""', "cuda:0\\", 'cuda:0");bad();("', "cuda:0\nbad()\n#"])
def test_a_label_of_any_text_stays_text(label: str) -> None:
    """Labels are checked where they come in; what is generated does not rely on that."""
    program, schedule, plan, whole = made("1f1b", (label, f"{label}1", "cpu:0"), 4, "except_last")
    package_files = package(program, plan, emit_scheduler(program, 4, whole))
    for text in (emit_steps(program, schedule, plan, whole), *package_files.values()):
        if not text.startswith("{"):
            names = [node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
            assert "bad" not in names


def test_golden_of_totals(golden: Golden) -> None:
    totals = made("1f1b", ("cpu:0",), 2)[-1].totals
    assert totals is not None
    golden("scheduler/totals.py", emit_totals(totals))


@pytest.mark.parametrize("checkpoint", mostly_slow(["never", "except_last", "always"], "except_last".__eq__))
@pytest.mark.parametrize(
    ("schedule", "devices"),
    [
        ("gpipe", ("cpu:0", "cpu:1", "cpu:0")),
        ("zb-h2", ("cuda:0", "cpu:0", "cuda:1")),
        ("interleaved", ("cuda:0", "cuda:1") * 3),
        ("zb-v", ("cpu:0", "cpu:1", "cpu:1", "cpu:0")),
        ("1f1b", ("cpu:0",)),
    ],
)
def test_text_is_clean_short_lined_and_the_same_each_time(
    schedule: str, devices: tuple[str, ...], checkpoint: str, tools: SimpleNamespace, tmp_path: Path
) -> None:
    parts = made(schedule, devices, 24, checkpoint)
    text = emit_steps(*parts)
    assert text == emit_steps(*parts)
    assert max(map(len, text.splitlines())) <= 110
    (tmp_path / "scheduler.py").write_text(text)
    tools.lint(tmp_path / "scheduler.py")
