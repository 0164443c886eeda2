"""`fxpipe.plan`, from a model to a plan that runs: what it decides, shows, keeps and refuses."""

from __future__ import annotations

import copy
import json
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.api.cheaper_cuts import cheaper_cuts, fits
from fxpipe.demo.unet import UNet
from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import Cluster, Device, Link
from fxpipe.ir.cluster.published_clusters import preset
from fxpipe.ir.plan import plan as plans
from fxpipe.ir.plan.layer_chain import Chain, Layer
from fxpipe.ir.timeline import check as check_timeline
from fxpipe.pipe.results import planned
from tests.helpers.marks import mostly_slow
from tests.helpers.models import MODELS
from tests.helpers.transparency import assert_same, build, inputs, plain, step

LAYERS = [Layer(f"conv{i}", 9e-3, 18e-3, 40e6, 1e9, 3e7) for i in range(5)]
CHAIN = Chain("VGG", 32, (*LAYERS, Layer("fc", 1e-3, 2e-3, 480e6, 1e6)))
WORKERS = Cluster.of(["cpu:0", "cpu:1"])
X = torch.randn(8, 1, 16, 16)


@pytest.fixture(scope="module")
def hybrid() -> fxpipe.Planned:
    return fxpipe.plan(CHAIN, "B", 512, time_limit=120)  # a second where nobody else is at work


@pytest.fixture(scope="module")
def straight() -> fxpipe.Planned:
    with torch.device("meta"):
        model = UNet()
    return fxpipe.plan(model, WORKERS, 8, example_inputs=X.to("meta"), planner="straight", micro_batches=4)


def test_the_best_plan_of_a_chain(hybrid: fxpipe.Planned) -> None:
    planned.check(hybrid)
    assert hybrid.certificate is not None
    assert hybrid.certificate.proven
    others = [fxpipe.plan(CHAIN, "B", 512, planner=name) for name in ("dapple", "pipedream", "data parallel")]
    assert all(hybrid.seconds <= other.seconds * (1 + 1e-9) for other in others)
    assert set(hybrid.memory) <= set(hybrid.cluster.labels)
    assert fits(hybrid)
    check_timeline(hybrid.timeline)


def test_what_is_simulated_is_what_was_planned(hybrid: fxpipe.Planned) -> None:
    assert hybrid.certificate is not None
    assert hybrid.seconds == pytest.approx(hybrid.certificate.bound)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "1f1b-late", "zb-h1", "zb-h2", "auto"])
def test_schedules(schedule: str) -> None:
    found = fxpipe.plan(CHAIN, "h100", 64, micro_batches=8, schedule=schedule, planner="dapple")
    assert found.plan.schedule == schedule or schedule == "auto"
    assert found.seconds == found.simulate(found.plan.schedule).makespan
    if schedule == "auto":
        assert all(found.seconds <= found.simulate(name).makespan for name in ("gpipe", "1f1b"))


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "auto"])
def test_what_is_proven_of_1f1b_is_not_said_of_other_orders(schedule: str) -> None:
    """Zero bubble is faster than any 1F1B."""
    chain = Chain("m", 4, tuple(Layer(str(i), 1e-3, 2e-3, 4e8, cut=1e6) for i in range(12)))
    proven, found = (fxpipe.plan(chain, "h100:4", 32, micro_batches=8, schedule=name) for name in (None, schedule))
    assert proven.certificate.proven
    assert found.seconds < proven.seconds or schedule == "gpipe"
    assert not found.certificate.proven
    assert found.certificate.bound == pytest.approx(8 * 12 * 3e-3 / 4)
    assert found.certificate.gap == pytest.approx(1 - found.certificate.bound / found.seconds)


def test_several_stages_on_each_device(tmp_path: Path) -> None:
    """Saved, explained and run, with replicas; in a V the last stage is on the devices of the first."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(8))).double()
    x, plain_model = torch.randn(12, 12, dtype=torch.double), copy.deepcopy(model)
    F.mse_loss(plain_model(x), x).backward()
    for schedule, times in (("interleaved", 2), ("zb-v", "auto")):
        found = fxpipe.plan(
            model, "p100:4", 12, example_inputs=x, micro_batches=3, schedule=schedule, stages_per_device=times
        )
        groups = [stage.devices for stage in found.layers.stages]
        assert groups == ([(0, 1), (2, 3)] * 2 if schedule == "interleaved" else [(0, 1), (2, 3), (2, 3), (0, 1)])
        assert found.seconds >= found.certificate.bound
        assert set(found.memory) == {f"P100:{device}" for device in range(4)}
        assert all(kinds.total == found.memory[label] for label, kinds in found.memory_kinds.items())
        assert "2:2 x 2 on 4 of 4 devices" in str(found)
        assert "P100:0-1" in found.text()
        assert re.search(r"P100:\d-\d set the pace", found.explain())
        found.save(tmp_path / "plan.json")
        assert planned.load(tmp_path / "plan.json") == found
        pipe = fxpipe.compile(model, devices=4, plan=tmp_path / "plan.json", example_inputs=x)
        pipe.step(x, target=x, loss_fn=F.mse_loss)
        assert pipe.schedule.name == schedule
        for own, other in zip(model.parameters(), plain_model.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-12, atol=1e-14)
        model.zero_grad()
        pipe.close()


def test_stages_per_device_that_cannot_be() -> None:
    with pytest.raises(PlanError, match="stages_per_device is 2, and with schedule='1f1b' each device has one stage"):
        fxpipe.plan(CHAIN, "h100", 64, schedule="1f1b", stages_per_device=2)
    layers, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))), torch.zeros(8, 8)
    with pytest.raises(PlanError, match="tensor_parallel does not go with schedule='interleaved' yet"):
        fxpipe.plan(layers, "h100", 8, example_inputs=x, schedule="interleaved", tensor_parallel="auto")


def test_a_schedule_that_does_not_fit() -> None:
    small = replace(WORKERS, devices=tuple(replace(d, memory=12 * 10**9) for d in WORKERS.devices))
    assert fxpipe.plan(CHAIN, small, 512, planner="straight", micro_batches=16, recompute=False, schedule="1f1b")
    with pytest.raises(PlanError, match="does not fit in memory in the order of 'gpipe'"):
        fxpipe.plan(CHAIN, small, 512, planner="straight", micro_batches=16, recompute=False, schedule="gpipe")


def test_a_plan_of_a_model_runs(straight: fxpipe.Planned) -> None:
    """Planned on the meta device; then with weights, in micro-batches, forward and as a step."""
    model = UNet()
    for first in ("forward", "step"):
        pipe = fxpipe.compile(model, plan=straight)
        assert len(straight.plan.stages) == 2
        if first == "forward":
            torch.testing.assert_close(pipe(X), model(X))
            assert pipe.plan == straight.plan
        loss = pipe.step(X, target=X, loss_fn=F.mse_loss)
        torch.testing.assert_close(loss, F.mse_loss(model(X), X).detach())
        if first == "step":
            assert [set(a.ops) - set(b.ops) for a, b in zip(pipe.plan.stages, straight.plan.stages, strict=True)] == [
                set(),
                {"loss", "output"},
            ]
        assert pipe.schedule.name == straight.plan.schedule
        pipe.close()


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ["skip ladder", "branches", "tied transformer", "containers"], ("skip ladder", "branches").__contains__
    ),
)
def test_other_models_run_as_planned(name: str) -> None:
    """Skips, shared parameters, an order that is not the captured one: cut between layers as between ops."""
    case = MODELS[name]
    model, (args, kwargs) = build(case), inputs(case, 6)
    options = {key: value for key, value in case.options.items() if key in ("batch_dim", "reduce")}
    known = fxpipe.profile(model, *args, device=WORKERS, **options, **kwargs)
    found = fxpipe.plan(known, WORKERS, 6, planner="straight", micro_batches=3)
    pipe = fxpipe.compile(model, plan=found, **case.options)
    assert_same(step(case, model, pipe, args, kwargs), plain(case, build(case), *inputs(case, 6), chunks=3))
    assert pipe.plan == found.plan
    pipe.close()


def test_one_file_for_all(straight: fxpipe.Planned, hybrid: fxpipe.Planned, tmp_path: Path) -> None:
    for found in (straight, hybrid):
        found.save(tmp_path / "plan.json")
        again = planned.load(tmp_path / "plan.json")
        assert again == found
        assert again.seconds == found.seconds
        assert plans.load((tmp_path / "plan.json").read_text()) == found.plan
    straight.save(tmp_path / "plan.json")
    pipe = fxpipe.compile(UNet(), plan=tmp_path / "plan.json", example_inputs=X)
    assert pipe.plan == straight.plan
    pipe.close()


def test_predictions_are_for_the_cluster_of_the_plan(tmp_path: Path) -> None:
    """Where the plan runs on its devices; a cluster in another order has them, too."""
    model, x = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), torch.randn(8, 32)
    devices = (replace(d, flops=d.flops / 50, bandwidth=d.bandwidth / 50) for d in WORKERS.devices)
    slow = replace(WORKERS, devices=tuple(devices))
    found = fxpipe.plan(model, slow, 8, example_inputs=x, planner="straight", micro_batches=4)
    found.save(tmp_path / "plan.json")
    seconds = list[float]()
    turned = replace(slow, devices=slow.devices[::-1])
    for plan, named, cluster in (
        (found, None, slow), (tmp_path / "plan.json", None, slow), (found, 2, slow), (found, turned, turned),
        (found, ["cpu:1", "cpu:0"], None), (found.plan, None, None),
    ):  # fmt: skip
        with closing(fxpipe.compile(model, named, plan=plan, example_inputs=x)) as pipe:
            assert (pipe.build.cluster == cluster) == (cluster is not None)
            assert (pipe.plan == found.plan) == (named != ["cpu:1", "cpu:0"])
            seconds.append(pipe.build.timeline.makespan)
    assert seconds[0] == seconds[1] == seconds[2] == seconds[3] > 2 * max(seconds[4:])
    with pytest.raises(PlanError, match=r"P100:3, which torch does not know: .* such as 'cuda:0', or .* devices=4"):
        fxpipe.compile(model, preset("p100:4"), 4)


def test_devices_stand_for_those_of_the_plan(straight: fxpipe.Planned) -> None:
    renamed = (replace(e, device=f"V100:{s}") for s, e in enumerate(straight.plan.stages))
    plan = replace(straight.plan, stages=tuple(renamed))
    with pytest.raises(PlanError, match=r"the plan is for V100:0, V100:1; say which devices .* devices=2"):
        fxpipe.compile(UNet(), plan=plan)
    with pytest.raises(PlanError, match=r"for 2 devices \(V100:0, V100:1\), and devices names 3"):
        fxpipe.compile(UNet(), 3, plan=plan)
    pipe = fxpipe.compile(UNet(), ["cpu:4", "cpu:5"], plan=plan, example_inputs=X)
    assert [stage.device for stage in pipe.plan.stages] == ["cpu:4", "cpu:5"]
    pipe.close()


def test_plans_that_the_engine_cannot_run(straight: fxpipe.Planned, hybrid: fxpipe.Planned) -> None:
    without = replace(straight.plan, stages=tuple(replace(stage, ops=()) for stage in straight.plan.stages))
    with pytest.raises(PlanError, match="stage 0 of the plan has no ops: it was made for a chain"):
        fxpipe.compile(UNet(), plan=without)
    with pytest.raises(PlanError, match="the plan is for another model"):
        fxpipe.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), plan=straight, example_inputs=torch.zeros(8, 4))


def test_explain(hybrid: fxpipe.Planned) -> None:
    text = hybrid.explain()
    assert text.startswith(str(hybrid))
    assert re.search(r"stage \d sets the pace: computing takes", text)
    for line in ("optimal", "data parallel DP", "straight", "dapple", "one more device", "twice the bandwidth"):
        assert re.search(rf"^  {line}", text, re.MULTILINE), text
    assert text.count("proven optimal") == text.count("no plan takes less") == 1
    assert re.search(r"^  optimal .* plans simulated, ", text, re.MULTILINE)
    assert "6 layers: they cannot be cut into 16 stages" in text


def test_pictures(hybrid: fxpipe.Planned) -> None:
    assert "forward" in hybrid.text()
    assert hybrid._repr_svg_().startswith("<svg")
    assert json.loads(hybrid.trace())["traceEvents"]


@pytest.mark.parametrize(
    ("what", "cluster", "options", "says"),
    [
        (CHAIN, "Z", {}, "cluster is 'Z': write 'A', 'B', 'C', .*, or a Cluster"),
        (CHAIN, "k80:x", {}, "'x' is no number of devices: write k80:8"),
        (CHAIN, 4, {}, "cluster is 4: write "),
        (CHAIN, Cluster(()), {}, "cannot plan: the cluster has no devices"),
        (UNet, Cluster(()), {"example_inputs": X}, "cannot plan: the cluster has no devices"),
        (UNet, "A", {}, "say which, as in example_inputs"),
        (CHAIN, Cluster((Device("a", 1, 1, 1), Device("b", 1, 1, 1, "far")), (Link(("a", "a"), 1, 1),)), {}, "no link"),
        ("UNet", "A", {}, "cannot plan a str"),
        (fxpipe.Profile("m", 1, "cpu", "measured", ()), "A", {}, "does not know the model"),
        (CHAIN, "A", {"planner": "best"}, "planner is 'best': write 'optimal', 'dapple'"),
        (
            CHAIN,
            "A",
            {"schedule": "forward-only"},
            "schedule is 'forward-only': write 'gpipe', .*, as in schedule='1f1b'",
        ),
        (CHAIN, "A", {"micro_batches": 0}, "micro_batches is 0: write 'auto', or a whole number from 1 to 4096"),
        (Chain("huge", 1, (Layer("a", 1, 1, 1e15),)), "A", {"planner": "straight"}, "1 layers: they cannot"),
        (Chain("huge", 1, (Layer("a", 1, 1, 1e15),)), "A", {"time_limit": 1}, "fits in memory"),
    ],
)
def test_refusals(what: object, cluster: object, options: dict[str, object], says: str) -> None:
    made = what() if isinstance(what, type) else what
    with pytest.raises(PlanError, match=says):
        fxpipe.plan(made, cluster, 64, **options)  # type: ignore[arg-type]


def test_files_that_are_no_plans(straight: fxpipe.Planned, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    with pytest.raises(PlanError, match="no plan to look at"):
        planned.load(file)
    file.write_text(plans.dump(straight.plan))
    with pytest.raises(PlanError, match="it does not say what its plan was made for"):
        planned.load(file)
    for wrong in ("[]", "{}", '{"planned": {}}', "no"):
        file.write_text(wrong)
        with pytest.raises(PlanError, match="no plan to look at"):
            planned.load(file)
    straight.save(file)
    data = json.loads(file.read_text())
    data["stages"][0]["device"] = "cpu:7"
    file.write_text(json.dumps(data))
    with pytest.raises(PlanError, match="are on different devices"):
        planned.load(file)


def test_compare(hybrid: fxpipe.Planned) -> None:
    other = fxpipe.plan(CHAIN, "B", 512, planner="data parallel")
    table = str(planned.compare(["a", "b"], [hybrid, other])).splitlines()
    assert table[2].startswith("a")
    assert table[2].endswith("0.0%")
    assert not table[3].endswith(" 0.0%")


V100S_AND_K80S = Cluster(
    (
        *(Device(f"V100:{i}", 16 * 10**9, 15e12, 9e11) for i in range(2)),
        *(Device(f"K80:{i}", 12 * 10**9, 3e12, 2e11) for i in range(2)),
    ),
    (Link(("local", "local"), 1e10, 1e-5),),
)


def test_devices_that_are_not_alike() -> None:
    """Estimated for each kind; a chain's times by the devices' speed, or as given; the same once saved."""
    with torch.device("meta"):
        model = UNet()
    found = fxpipe.plan(
        model, V100S_AND_K80S, 16, example_inputs=X.to("meta"), planner="straight", micro_batches=4, most_layers=8
    )
    (slow,) = found.chain.kinds
    assert slow.kind == "K80"
    assert all(k80 > layer.forward for k80, layer in zip(slow.forwards, found.chain.layers, strict=True))
    chain = fxpipe.plan(CHAIN, V100S_AND_K80S, 128, micro_batches=4)
    assert chain.chain.kinds[0].forwards == pytest.approx([5 * layer.forward for layer in chain.chain.layers])
    alike = fxpipe.plan({"V100": CHAIN, "K80": CHAIN}, V100S_AND_K80S, 128, micro_batches=4)
    assert alike.seconds < chain.seconds
    assert len(alike.memory) == 4


def test_costs_for_each_kind_of_device() -> None:
    with pytest.raises(PlanError, match=r"no costs for K80:0: they are given for V100"):
        fxpipe.plan({"V100": CHAIN}, V100S_AND_K80S, 128)
    with pytest.raises(PlanError, match=r"for 'K80' there is a int: give what fxpipe.profile returned"):
        fxpipe.plan({"V100": CHAIN, "K80": 3}, V100S_AND_K80S, 128)  # type: ignore[dict-item]
    with pytest.raises(PlanError, match=r"for 'K80' is not of the model that the others are of, VGG"):
        fxpipe.plan({"V100": CHAIN, "K80": replace(CHAIN, layers=CHAIN.layers[:1])}, V100S_AND_K80S, 128)


def test_one_file_for_kinds_of_devices(tmp_path: Path) -> None:
    found = fxpipe.plan(CHAIN, V100S_AND_K80S, 128, micro_batches=4)
    found.save(tmp_path / "plan.json")
    again = planned.load(tmp_path / "plan.json")
    assert (again, again.seconds) == (found, found.seconds)


class Words(nn.Module):
    """A table of 100 words, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(100, 256), nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.table(ids)).relu())


IDS = torch.zeros(4, 32, dtype=torch.long)


def test_tokens_utilization_and_memory_by_kind(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Words()
    found = fxpipe.plan(model, "h100:2", 64, example_inputs=(IDS.to("meta"),), dtype="bf16", planner="straight")
    products = 3 * 2 * 32 * (256 * 512 + 512 * 256)  # forward, and two products backward, of 32 tokens
    assert found.work == planned.SampleWork((("bf16", products),), 32)
    assert found.tokens_per_second == pytest.approx(64 * 32 / found.seconds)
    assert found.utilization == pytest.approx(64 * products / (2 * 989.4e12) / found.seconds)
    assert "tokens per second" in str(found)
    assert "MFU" in str(found)
    for label, kinds in found.memory_kinds.items():
        assert kinds.total == found.memory[label]
        assert (kinds.gradients, kinds.optimizer) == (kinds.parameters, 6 * kinds.parameters)  # with a master copy
    weights = 100 * 256 + 256 * 512 + 512 + 512 * 256 + 256
    assert sum(kinds.parameters for kinds in found.memory_kinds.values()) == 2 * weights
    found.save(tmp_path / "plan.json")
    assert planned.load(tmp_path / "plan.json") == found


def with_memory(cluster: str, each: float) -> Cluster:
    found = preset(cluster)
    return replace(found, devices=tuple(replace(device, memory=int(each)) for device in found.devices))


BODY = Chain("Net", 12, (Layer("body", 9e-3, 18e-3, 1e9, 3e8, 8e6), Layer("head", 3e-3, 6e-3, 2e8, 2e8)))


@pytest.mark.parametrize("asked", ["zero1", "auto"])
def test_sharded_optimizer_state_makes_a_plan_fit(asked: str, tmp_path: Path) -> None:
    """The body alone takes 4 GB with Adam, more than a device has; four replicas have 2.4 GB and a fourth of 2.4 GB."""
    small = with_memory("h100:4", 3.6e9)
    with pytest.raises(PlanError, match="allow recompute, optimizer_sharding='auto', smaller"):
        fxpipe.plan(BODY, small, 48)
    found = fxpipe.plan(BODY, small, 48, optimizer_sharding=asked)
    assert found.plan.optimizer_sharding == found.layers.optimizer_sharding == "zero1"
    assert (len(found.memory), fits(found)) == (4, True)
    kinds = found.memory_kinds["H100:0"]
    assert (kinds.parameters, kinds.gradients, kinds.optimizer) == (1.2e9, 1.2e9, 0.6e9)
    assert kinds.total == found.memory["H100:0"]
    assert ", 1f1b, ZeRO-1\n" in str(found)
    assert re.search(r"without ZeRO-1 +no plan found that fits", found.explain())
    assert found.certificate is not None
    assert str(found.certificate).startswith("proven optimal, with ZeRO-1")
    found.save(tmp_path / "plan.json")
    assert planned.load(tmp_path / "plan.json") == found
    assert plans.load((tmp_path / "plan.json").read_text()).optimizer_sharding == "zero1"


def test_explain_says_what_sharding_would_save_of_recomputation() -> None:
    """Two stages of two replicas: 2 x 2 GB, and 1.2 GB of each micro-batch; the first has two of them."""
    chain = Chain("Net", 12, tuple(Layer(name, 9e-3, 18e-3, 1e9, 2.4e9, 8e6) for name in "ab"))
    found = fxpipe.plan(chain, with_memory("h100:4", 6.2e9), 48, micro_batches=4)
    assert [stage.recompute for stage in found.layers.stages] == [True, False]
    row = re.search(r"with ZeRO-1 +\S+ ms +-(\d+)", found.explain())
    assert row is not None
    assert int(row[1]) > 0


def test_optimizer_state_is_sharded_only_where_memory_asks_for_it() -> None:
    whole, sharded = (fxpipe.plan(BODY, "h100:4", 48, optimizer_sharding=asked) for asked in ("auto", "zero1"))
    assert (whole.layers.optimizer_sharding, sharded.layers.optimizer_sharding) == ("none", "zero1")
    assert whole.seconds == sharded.seconds
    small, found = with_memory("h100:4", 5e9), {}  # for 4.8 GB, and 125 MB of each micro-batch that waits
    for schedule in ("1f1b", "gpipe"):
        given = {"micro_batches": 4, "schedule": schedule, "planner": "data parallel"}
        found[schedule] = fxpipe.plan(BODY, small, 48, optimizer_sharding="auto", **given)
        assert fits(found[schedule])
    assert [one.plan.optimizer_sharding for one in found.values()] == ["none", "zero1"]
    with pytest.raises(PlanError, match="does not fit in memory in the order of 'gpipe'"):
        fxpipe.plan(BODY, small, 48, **given)


def test_a_chain_has_no_utilization(hybrid: fxpipe.Planned) -> None:
    assert (hybrid.utilization, hybrid.tokens_per_second) == (None, None)
    assert "MFU" not in str(hybrid)


def test_narrow_types_take_less_time() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096))
    x = torch.zeros(8, 4096, device="meta")
    plans = [
        fxpipe.plan(model, "h100:1", 65536, example_inputs=(x,), dtype=dtype, planner="straight", micro_batches=1)
        for dtype in (None, "f32", "tf32", "bf16", "f8")
    ]
    seconds = [one.seconds for one in plans]
    assert seconds[0] == seconds[1] > 4 * seconds[2] > 4 * seconds[3] > 4 * seconds[4]
    parameters = [one.memory_kinds["H100:0"].parameters for one in plans]
    assert parameters[1] == parameters[2] == 2 * parameters[3] == 2 * parameters[4]
    assert plans[2].work.flops[0][0] == "tf32"


@pytest.mark.parametrize(
    ("what", "cluster", "told"),
    [
        (nn.Linear(8, 8), "p40", "dtype is 'bf16', and P40:0 has no speed for it; it has f32: add one to the device"),
        (nn.Linear(8, 8), WORKERS, "dtype is 'bf16', and cpu:0 has no speed for it"),
        (CHAIN, "A", "dtype='bf16' is for models; a Chain has the times of its own type"),
    ],
)
def test_types_that_are_refused(what: nn.Module | Chain, cluster: Cluster | str, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        fxpipe.plan(what, cluster, 8, example_inputs=(torch.zeros(8, 8),), dtype="bf16")


def test_sharded_parameters_make_a_plan_fit(tmp_path: Path) -> None:
    """Two stages would take 9 GB each. As one stage, each of two replicas has half of 18 GB, and 2 GB for a layer that
    is gathered, with its gradient. With one micro-batch a pipeline would take twice as long."""
    chain = Chain("Net", 12, tuple(Layer(name, 9e-3, 18e-3, 1e9, 1e6, 8e6) for name in "abc"))
    small, given = with_memory("h100:2", 11.2e9), {"micro_batches": 1, "parameter_copies": 6}
    found = fxpipe.plan(chain, small, 12, optimizer_sharding="auto", **given)
    assert found.plan.optimizer_sharding == found.layers.optimizer_sharding == "zero3"
    assert (len(found.memory), fits(found)) == (2, True)
    kinds = found.memory_kinds["H100:0"]
    assert (kinds.parameters, kinds.gradients, kinds.optimizer) == (2.5e9, 2.5e9, 6e9)
    assert kinds.total == found.memory["H100:0"]
    assert ", 1f1b, ZeRO-3\n" in str(found)
    told = found.explain()
    assert re.search(r"without ZeRO-3 +(\S+ ms +\+|no plan found)", told)
    assert re.search(r"with ZeRO-1 +(\S+ ms +\+|no plan found)", told)
    assert str(found.certificate).startswith("proven optimal, with ZeRO-1 or ZeRO-3 where memory asks for it")
    own = fxpipe.plan(chain, small, 12, optimizer_sharding="zero3", **given)
    assert str(own.certificate).startswith("proven optimal, with ZeRO-3")
    assert own.seconds == found.seconds
    found.save(tmp_path / "plan.json")
    assert planned.load(tmp_path / "plan.json") == found
    assert plans.load((tmp_path / "plan.json").read_text()).optimizer_sharding == "zero3"
    roomy = fxpipe.plan(chain, "h100:2", 12, optimizer_sharding="auto", **given)
    assert roomy.plan.optimizer_sharding == "none"
    assert roomy.seconds < found.seconds  # gathering takes time


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_sharded_parameters_need_a_backward_of_one_action(schedule: str) -> None:
    with pytest.raises(
        PlanError, match="leave out tensor_parallel, and schedules that split backward, such as 'zb-h1', "
    ):
        fxpipe.plan(BODY, "h100:4", 48, optimizer_sharding="zero3", schedule=schedule)
    found = fxpipe.plan(BODY, with_memory("h100:4", 3.6e9), 48, optimizer_sharding="auto", schedule="zb-h1")
    assert found.plan.optimizer_sharding == "zero1"


@pytest.mark.parametrize(("middle", "moves"), [(2e-4, True), (2e-3, False)])
def test_of_cuts_that_take_about_as_long_the_one_that_fewer_bytes_cross(middle: float, moves: bool) -> None:
    """The fastest plan cuts behind the middle layer, where much crosses."""
    last = 1e-2 + middle
    layers = (
        fxpipe.Layer("first", 1e-2, 2e-2, cut=1e5),
        fxpipe.Layer("middle", middle, 2 * middle, cut=9e5),
        fxpipe.Layer("last", last, 2 * last),
    )
    found = fxpipe.plan(fxpipe.Chain("Net", 4, layers), "h100:2", 32, planner="straight", micro_batches=8)
    assert [stage.end for stage in found.layers.stages] == [2, 3]
    moved = cheaper_cuts(found)
    assert [stage.end for stage in moved.stages] == ([1, 3] if moves else [2, 3])
    assert (moved is found.layers) != moves


@pytest.mark.parametrize(("dtype", "copies"), [("bf16", 8), ("f16", 8), (None, 4), ("tf32", 4)])
def test_in_16_bits_memory_has_master_copies_too(dtype: str | None, copies: float) -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)), torch.zeros(8, 256)
    found, given = (
        fxpipe.plan(model, "h100:2", 8, example_inputs=(x,), dtype=dtype, micro_batches=2, **options)
        for options in ({}, {"parameter_copies": 3})
    )
    assert (found.copies, given.copies) == (copies, 3)
    assert ("master copy" in str(found)) == (copies == 8)
    assert "master copy" not in str(given)
    kinds = [one for one in found.memory_kinds.values() if one.parameters]
    assert all(one.optimizer == (copies - 2) * one.parameters for one in kinds)


class HalfTurn(nn.Module):
    """The second half of the tokens comes first. With the length as a symbol, its half is an op."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, half = self.embed(ids), ids.shape[1] // 2
        return self.layers(torch.cat([x[:, half:], x[:, :half]], 1))


def test_a_plan_for_tokens_runs() -> None:
    """A plan names the ops of the sizes that it was made with, so a pipe captures these sizes, too."""
    model, ids = HalfTurn(), torch.randint(11, (8, 6))
    found = fxpipe.plan(model, WORKERS, 8, example_inputs=(ids,), planner="straight", micro_batches=4)
    with closing(fxpipe.compile(model, plan=found, example_inputs=(ids,))) as pipe:
        torch.testing.assert_close(pipe(ids), model(ids))
        target = torch.zeros(8, 6, 8)
        torch.testing.assert_close(
            pipe.step(ids, target=target, loss_fn=F.mse_loss), F.mse_loss(model(ids), target).detach()
        )
        for length in (5, 8):  # other lengths are captured anew, and run where their parameters are
            other = torch.randint(11, (8, length))
            torch.testing.assert_close(pipe(other), model(other))
