"""Replicated stages, beside the plain model run on the same slices: statistics, random numbers, buffers, faults."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, product
from threading import current_thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.engines.local.thread_autotune import ThreadAutotune
from fxpipe.errors import FxpipeError, PlanError
from fxpipe.ir import timeline
from fxpipe.ir.plan import plan as plans
from fxpipe.ir.program import device_programs
from fxpipe.ir.units import show_seconds
from fxpipe.pipe.build.build_report import cost_table
from fxpipe.runtime.microbatch import split_sizes
from fxpipe.runtime.random import new_seed, replica_seed
from tests.helpers.marks import mostly_slow
from tests.helpers.transparency import Seeded

X = torch.linspace(-2, 3, 42, dtype=torch.float64).sin().view(7, 6)
Y = torch.linspace(1, 2, 42, dtype=torch.float64).cos().view(7, 6)
CHUNKS = 4  # of 2, 2, 2 and 1 samples: the second replica has nothing to do for the last
Compile = Callable[..., fxpipe.Pipe]


@pytest.fixture
def compile() -> Iterator[Compile]:
    """fxpipe.compile, and pipes that end with the test."""
    made: list[fxpipe.Pipe] = []

    def compile(model: nn.Module, replicas: Sequence[int], chunks: int = CHUNKS, **options: Any) -> fxpipe.Pipe:
        made.append(fxpipe.compile(model, sum(replicas), chunks, replicas=replicas, **options))
        return made[-1]

    yield compile
    for pipe in made:
        pipe.close()


@pytest.fixture(autouse=True)
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers run a step, one thread runs the next one, and so on."""
    alone = cycle((False, True))
    monkeypatch.setattr(ThreadAutotune, "choose", lambda pace: next(alone))


def grads(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_equal(got: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


# The plain model, on the same slices ----------------------------------------------------------------------------------


class Block(nn.Module):
    """A stage: draws random numbers twice, normalises with the statistics of what it sees, counts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.detach().sum())
        return self.b(self.drop(torch.tanh(self.norm(self.a(self.drop(x)))))) + x


class Blocks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def blocks(count: int) -> Blocks:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Blocks(count).double()


def twins(block: nn.Module, count: int) -> list[nn.Module]:
    """The block, and more with the same parameters and with buffers of their own: replicas, as they begin a step."""
    own = {id(p): p for p in block.parameters()}
    return [block, *(copy.deepcopy(block, dict(own)) for _ in range(count - 1))]


def plain_step(model: Blocks, replicas: Sequence[int], x: Tensor, y: Tensor) -> Tensor:
    """The loss of the batch, with gradients, when block s is run by so many replicas."""
    seed, outputs = new_seed(), []
    replica_groups = [twins(block, count) for block, count in zip(model.blocks, replicas, strict=True)]
    with torch.random.fork_rng(devices=[]):
        for i, piece in enumerate(x.split(split_sizes(len(x), CHUNKS))):
            for s, replica_group in enumerate(replica_groups):
                parts = []
                for k, part in enumerate(piece.split(split_sizes(len(piece), len(replica_group)))):
                    with Seeded(replica_seed(seed, k), i) as draws:
                        draws.count = 2 * s
                        parts.append(replica_group[k](part))
                piece = torch.cat(parts)
            outputs.append(piece)
    loss = (torch.cat(outputs) * y).sum()
    loss.backward()
    return loss.detach()


def times(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum()


@pytest.mark.parametrize(
    ("replicas", "checkpoint"),
    mostly_slow(
        product([(1, 2), (2, 1), (2, 2), (2, 3), (3, 2)], ["never", "always"]),
        [((1, 2), "always"), ((2, 1), "never"), ((2, 2), "always"), ((2, 3), "never")].__contains__,
    ),
)
def test_statistics_random_numbers_and_buffers_are_those_of_slices(
    compile: Compile, replicas: tuple[int, ...], checkpoint: str
) -> None:
    """Batch norm uses the statistics of a slice; the model keeps what the first replica of a stage has written."""
    x, y, twin, model = X.repeat(2, 1), Y.repeat(2, 1), blocks(2), blocks(2)  # 4, 4, 3, 3: no slice of one sample ...
    x, y = (x, y) if max(replicas) < 3 else (torch.cat([x, x]), torch.cat([y, y]))  # ... also of three
    pipe = compile(twin, replicas, schedule="1f1b", checkpoint=checkpoint, cut=["blocks.1"])
    if 3 in split_sizes(len(x), CHUNKS) and 2 in replicas:
        x, y = torch.cat([x, x[:2]]), torch.cat([y, y[:2]])  # 4 times 4
    for turn in range(2):  # gradients of two steps add up
        torch.manual_seed(turn)
        wanted = plain_step(model, replicas, x, y)
        torch.manual_seed(turn)
        assert_equal([pipe.step(x, target=y, loss_fn=times)], [wanted])
        assert_equal(grads(twin), grads(model))
        assert_equal([*twin.buffers()], [*model.buffers()])


def test_deferred_batch_norm_has_the_statistics_of_the_whole_batch(compile: Compile) -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)).double()
    whole = copy.deepcopy(model)
    pipe = compile(model, (2, 1), 2, deferred_batch_norm=True)
    x = torch.cat([X, X[:1]])
    pipe.step(x, target=x, loss_fn=F.mse_loss)
    whole(x)
    assert_equal([*model.buffers()], [*whole.buffers()])


# What a step promises -------------------------------------------------------------------------------------------------


def chain() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh()))).double()


def test_keys_inputs_and_accumulated_gradients_are_the_models(compile: Compile) -> None:
    twin, model = chain(), chain()
    pipe = compile(twin, (2, 3), schedule="zb-h1")
    x, z = X.clone().requires_grad_(), X.clone().requires_grad_()
    for _ in range(2):
        F.mse_loss(model(x), Y).backward()
        pipe.step(z, target=Y, loss_fn=F.mse_loss)
    assert_equal([*grads(twin), z.grad], [*grads(model), x.grad])
    assert list(pipe.state_dict()) == list(model.state_dict())
    assert list(twin.parameters()) == [*pipe.stages[0].parameters(), *pipe.stages[1].parameters()]


def test_a_call_runs_on_the_first_replicas(compile: Compile) -> None:
    twin, model = chain(), chain()
    pipe = compile(twin, (2, 1))
    assert_equal([pipe(X)], [model(X)])
    pipe(X).sum().backward()
    model(X).sum().backward()
    assert_equal(grads(twin), grads(model))
    assert "of stage 0 on cpu:0, cpu:1; in steps each has a slice of every micro-batch" in pipe.explain()
    assert pipe.build.timeline.devices == ("cpu:0", "cpu:2")


def test_the_table_has_the_times_of_a_replica(compile: Compile) -> None:
    """Those that the step is simulated with; in a call the first replica has whole micro-batches."""
    pipe = compile(chain(), (2, 1))
    shown = []
    for run in (lambda: pipe(X), lambda: pipe.step(X, loss_fn=torch.sum)):
        run()
        shown.append([row[4] for row in cost_table(pipe.build)[1]])
        spans = [span for span in pipe.build.timeline.spans if (span.kind, span.micro_batch) == ("F", 0)]
        times = {span.stage: show_seconds(span.end - span.start) for span in spans}
        assert shown[-1] == [times[0], times[1]]
        assert ("of the slowest slice" in pipe.explain()) == (pipe.build.graph.loss is not None)
    (whole, _), (part, _) = shown
    assert whole != part


def test_freezing_and_new_values_take_effect_at_once(compile: Compile) -> None:
    twin, model = chain(), chain()
    pipe = compile(twin, (1, 2))
    for turn in range(3):
        for one in (twin, model):
            one[-2].weight.requires_grad_(turn != 1)
            one.zero_grad()
            with torch.no_grad():
                one[-2].weight.mul_(1.5)
        F.mse_loss(model(X), Y).backward()
        pipe.step(X, target=Y, loss_fn=F.mse_loss)
        assert_equal(grads(twin), grads(model))


class Refuse(torch.autograd.Function):
    """The identity, which fails in the chosen direction on the chosen worker, once it has run `skips` times there."""

    chosen: tuple[str, str] | None = None
    skips = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        reach("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        reach("backward")
        return grad.clone()


def reach(way: str) -> None:
    if Refuse.chosen == (way, current_thread().name):
        if not Refuse.skips:
            raise ArithmeticError("not here")
        Refuse.skips -= 1


@torch.compiler.allow_in_graph  # as it is, not what it computes
def refuse(x: Tensor) -> Tensor:
    found: Tensor = Refuse.apply(x)
    return found


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = chain(), chain()

    def forward(self, x: Tensor) -> Tensor:
        return refuse(self.b(refuse(self.a(x))))


@pytest.mark.parametrize("way", mostly_slow(["forward", "backward"], "backward".__eq__))
@pytest.mark.parametrize(
    ("thread", "stage"), [("fxpipe cpu:1", 0), ("MainThread", 1), ("fxpipe cpu:3", 1), ("MainThread alone", 0)]
)
def test_a_fault_in_a_replica_leaves_no_gradient(
    compile: Compile, way: str, thread: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or in one of those that a thread runs alone: the second run of the first stage, or of the last one back."""
    thread, alone = thread.removesuffix(" alone"), thread.endswith(" alone")
    stage = 1 if alone and way == "backward" else stage
    monkeypatch.setattr(ThreadAutotune, "choose", lambda pace: alone)
    model = Fails()
    pipe = compile(model, (2, 2), schedule="1f1b", cut=["b.0"])
    pipe.step(X, target=Y, loss_fn=F.mse_loss)
    wanted = grads(model)
    model.zero_grad()
    for _ in range(2):
        monkeypatch.setattr(Refuse, "chosen", (way, thread))
        monkeypatch.setattr(Refuse, "skips", int(alone))
        with pytest.raises(ArithmeticError, match="not here") as error:
            pipe.step(X, target=Y, loss_fn=F.mse_loss)
        where = (
            f"stage {stage}, micro-batch 0"
            + ", replica 1" * (alone or thread[-1] in "13")
            + ", in backward" * (way == "backward")
        )
        assert error.value.__notes__[0].partition(", at")[0] == where
        assert grads(model) == [None] * 16
    monkeypatch.setattr(Refuse, "chosen", None)
    pipe.step(X, target=Y, loss_fn=F.mse_loss)
    assert_equal(grads(model), wanted)


# What crosses ---------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A number made of parameters alone is computed in the first stage and used in both."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(6))
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.log.exp()
        return self.b(self.a(x * scale)) * scale


@pytest.mark.parametrize("replicas", [(1, 2), (2, 1), (3, 2)])
def test_what_is_the_same_for_all_samples_crosses_whole(compile: Compile, replicas: tuple[int, ...]) -> None:
    twin = Scaled().double()
    model = copy.deepcopy(twin)
    pipe = compile(twin, replicas, cut=["b"])
    F.mse_loss(model(X), Y).backward()
    pipe.step(X, target=Y, loss_fn=F.mse_loss)
    assert {(*ends, dim) for _, *ends, dim in pipe.scheduler.cuts} == {(0, 1, 0), (0, 1, None)}
    assert_equal(grads(twin), grads(model))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.a(x)
        size = x.square().mean()
        return self.b(x), size * 2


def own_loss(output: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return F.mse_loss(output[0], y) + output[1]


def test_what_was_made_of_all_samples_is_refused(compile: Compile) -> None:
    model = Pooled().double()
    with pytest.raises(PlanError, match=r"size, f64\[\], made at .*size = x.square\(\).mean\(\), goes from") as e:
        compile(model, (1, 2), cut=["b"]).step(X, target=Y, loss_fn=own_loss)
    assert "on cpu:0, to stage 1, on cpu:1, cpu:2, and cannot be cut between samples" in str(e.value)
    twin = copy.deepcopy(model)
    compile(model, (2, 2), cut=["b"]).step(X, target=Y, loss_fn=own_loss)
    own_loss(twin(X), Y).backward()
    assert_equal(grads(model), grads(twin))


# How it is asked for, and looked at -----------------------------------------------------------------------------------


def test_plans_with_replicas_run(tmp_path: Any) -> None:
    model = chain()
    found = fxpipe.plan(
        model, fxpipe.Cluster.of(["V100:0", "V100:1"]), 8, example_inputs=(X,), planner="data parallel", micro_batches=2
    )
    assert len(found.plan.stages[0].devices) == 2
    with pytest.raises(PlanError, match="the plan is for V100:0, V100:1; say which devices"):
        fxpipe.compile(model, plan=found)
    pipe = fxpipe.compile(model, ["cpu:1", "cpu:2"], plan=found)
    pipe.step(X, target=Y, loss_fn=F.mse_loss)
    got = grads(model)
    model.zero_grad()
    F.mse_loss(model(X), Y).backward()
    assert_equal(got, grads(model))
    (tmp_path / "plan.json").write_text(pipe.files["plan.json"])
    again = fxpipe.compile(model, plan=tmp_path / "plan.json")
    again.step(X, target=Y, loss_fn=F.mse_loss)
    assert again.plan == pipe.plan
    pipe.save(tmp_path / "package")
    loaded = fxpipe.load(tmp_path / "package", model)
    model.zero_grad()
    loaded.step(X, target=Y, loss_fn=F.mse_loss)
    assert_equal(grads(model), got)
    for one in (pipe, again, loaded):
        one.close()


@pytest.mark.parametrize(
    ("devices", "replicas", "says"),
    [
        (3, (2, 2), r"replicas is \(2, 2\), which takes 4 devices, and devices names 3: .* or devices=4"),
        (3, (3, 0), r"replicas is \(3, 0\): write a list of counts of at least 1, as in replicas=\(2, 1\)"),
        (3, 3, "replicas is 3: write a list of counts"),
        (3, "21", "replicas is '21': write a list of counts"),
        (2, (True, 1), "write a list of counts"),
        (["cpu:0", "cpu:1", "cpu:0"], (2, 1), "name each of .* once"),
    ],
)
def test_counts_that_make_no_sense(devices: Any, replicas: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        fxpipe.compile(chain(), devices, 4, replicas=replicas)


def test_plans_whose_stages_share_half_their_devices(compile: Compile) -> None:
    pipe = compile(chain(), (2, 1), example_inputs=X)
    first, last = pipe.plan.stages
    wrong = plans.Plan(pipe.plan.model, (first, plans.StagePlan(last.ops, "cpu:1", "never")), 4)
    with pytest.raises(
        PlanError, match="stage 1 of the plan is on cpu:1: stages that share a device share all of theirs"
    ):
        fxpipe.compile(chain(), plan=wrong)
    with pytest.raises(PlanError, match=r"replicas is \(1, 2\), and the plan says stage 0 on cpu:0 and cpu:1, stage"):
        fxpipe.compile(chain(), plan=pipe.plan, replicas=(1, 2))


def test_every_worker_is_seen(compile: Compile) -> None:
    pipe = compile(chain(), (1, 2), schedule="interleaved")
    pipe.step(X, target=Y, loss_fn=F.mse_loss, timeline=True)
    timeline.check(pipe.timeline)
    assert pipe.timeline.devices == pipe.programs.devices == pipe.build.timeline.devices == ("cpu:0", "cpu:1", "cpu:2")
    ran = {(span.kind, span.stage, span.micro_batch) for span in pipe.timeline.on("cpu:2")}
    assert {task for task in ran if task[2] == 3} == set()  # of one sample
    assert {(stage, i) for kind, stage, i in ran if kind == "F"} == {(stage, i) for stage in (1, 3) for i in range(3)}
    device_programs.check(pipe.programs)
    assert "cpu:2 busy" in str(pipe.compare())
    with pytest.raises(FxpipeError, match="rehearse is for stages without replicas"):
        pipe.rehearse(X, target=Y, loss_fn=F.mse_loss)
