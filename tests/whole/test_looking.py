"""Everything a pipe shows of itself: tables, pictures, files; and what can be done with the files."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.api.cli.main import main
from fxpipe.capture import CallCapture
from fxpipe.errors import InputError, PackageError, PlanError
from fxpipe.ir.plan import plan as plans

ROOT = Path(__file__).parents[2]


class Net(nn.Module):
    """A skip over the middle, a tied weight, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.tanh(self.first(x))
        h = self.drop(self.middle(skip))
        return self.last(h + skip)


X = torch.linspace(-1, 1, 64).view(8, 8)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def pipe(model: nn.Module) -> Iterator[fxpipe.Pipe]:
    pipe = fxpipe.compile(model, devices=3, chunks=4, cut=["middle", "last"], example_inputs=X)
    yield pipe
    pipe.close()


def sizes(pipe: fxpipe.Pipe) -> list[int]:
    return [len(stage.ops) for stage in pipe.plan.stages]


# Tables and pictures --------------------------------------------------------------------------------------------------


def test_explain(pipe: fxpipe.Pipe) -> None:
    head, _, titles, _, *rows = pipe.explain().splitlines()
    assert head == "Net: 3 stages, 4 micro-batches, gpipe; times estimated for a micro-batch of 2"
    assert re.split(r"\s{2,}", titles.strip()) == [
        "stage", "device", "ops", "parameters", "forward", "backward", "keeps", "takes", "gives", "recompute"
    ]  # fmt: skip
    cells = [re.split(r"\s{2,}", row.strip()) for row in rows[:3]]
    # A shared parameter counts where it lives.
    assert [row[:4] for row in cells] == [
        ["0", "cpu:0", "2", "72"],
        ["1", "cpu:1", "5", "144"],
        ["2", "cpu:2", "1", "8"],
    ]
    assert [row[7:] for row in cells] == [
        ["64 B", "64 B", "except_last"],
        ["64 B", "64 B", "except_last"],
        ["64 B", "64 B", "never"],  # it would keep no less
    ]
    chosen = "except_last, except_last, never: recomputed where that lowers the peak of what the device keeps"
    assert rows[3:5] == ["", f'checkpoint="auto" chose {chosen}']
    assert rows[5:] == ["shared: first_weight, at home in stage 0, used by stage 2, 256 B once a step"]


def test_portals_are_named() -> None:
    pipe = fxpipe.compile(Net(), 4, 4, cut=["middle", "middle.2", "last"], example_inputs=X)
    assert "portal: skip, from stage 0 to stage 2" in pipe.explain().splitlines()
    assert list(pipe.trail) == ["cut", "portals", "tie_weights", "recompute"]
    portals = [move.value for move in pipe.trail["portals"].moves if move.portal]
    assert [value for value in portals if value != "training"] == ["skip", "first_weight"]
    pipe.close()


def test_the_schedule_as_a_grid(pipe: fxpipe.Pipe) -> None:
    assert str(pipe.schedule) == textwrap.dedent("""\
        gpipe: 3 stages, 4 micro-batches
        clock      0   1   2   3   4   5   6   7   8   9  10  11
        device 0  F0  F1  F2  F3                  B3  B2  B1  B0
        device 1      F0  F1  F2  F3          B3  B2  B1  B0
        device 2          F0  F1  F2  F3  B3  B2  B1  B0""")


def test_the_picture_is_svg(pipe: fxpipe.Pipe, tmp_path: Path) -> None:
    root = ElementTree.fromstring(pipe.draw(tmp_path / "stages.svg").read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = {"".join(node.itertext()).strip() for node in root.iter()}
    assert {"Net", "stage 0", "cpu:0", "cpu:1", "cpu:2"} <= texts


def test_what_is_shown_is_what_runs(pipe: fxpipe.Pipe) -> None:
    assert [stage.source for stage in pipe.stages] == [pipe.files[f"stage{j}.py"] for j in range(3)]
    assert pipe.scheduler.source == pipe.files["scheduler.py"]
    assert "test_looking.py:" in pipe.stages[0].source


def test_nothing_to_see_yet(model: nn.Module) -> None:
    with pytest.raises(fxpipe.FxpipeError, match="call the pipe once, or pass example_inputs"):
        fxpipe.compile(model, devices=2, chunks=2).explain()


# The folder of all that was made --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["dump=", "FXPIPE_DUMP"])
def test_dump(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    folder = tmp_path / "made"
    if way == "FXPIPE_DUMP":
        monkeypatch.setenv(way, str(folder))
    pipe = fxpipe.compile(model, 3, 4, cut=["middle", "last"], dump=folder if way == "dump=" else None)
    pipe(X)
    steps = ["00-capture.txt", "01-cut.txt", "02-portals.txt", "03-tie-weights.txt", "04-recompute.txt"]
    package = ["__init__.py", "plan.json", "scheduler.py", "stage0.py", "stage1.py", "stage2.py"]
    facts = ["profile.txt", "programs.txt", "schedule.txt", "timeline.svg", "timeline.txt"]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*steps, *package, *facts])
    before, after = ((folder / name).read_text().splitlines() for name in steps[1:3])
    changes = [line for line in difflib.unified_diff(before, after, n=0, lineterm="") if line[:2] in ("- ", "+ ")]
    assert [line for line in changes if "training" not in line] == [
        "-  takes    first_weight: f32[8, 8]",
        "-  gives    first_weight: f32[8, 8]",
        "-  first_weight  0 -> 1",
        "-  first_weight  1 -> 2",
        "+  first_weight  0 -> 2  portal",
    ]
    pipe.eval()
    pipe(X)
    assert "dropout" in (folder / "00-capture.txt").read_text()
    pipe(X.view(8, 1, 8))
    assert any((folder / f"2-{mode}" / "01-cut.txt").exists() for mode in ("train", "eval"))
    pipe.close()


# Saved and loaded -----------------------------------------------------------------------------------------------------


def test_a_saved_package_is_the_pipe(pipe: fxpipe.Pipe, tmp_path: Path) -> None:
    pipe.save(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*pipe.files, "model.json"}
    other = Net()
    other.load_state_dict(pipe.state_dict())
    loaded = fxpipe.load(tmp_path / "out", other)
    results = []
    for net in (pipe, loaded):
        torch.manual_seed(3)
        y = net(X)
        y.square().sum().backward()
        results.append([y, *(p.grad for p in net.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    loaded.close()


def test_an_edit_takes_effect(pipe: fxpipe.Pipe, model: nn.Module, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    pipe.eval()
    pipe(X)
    pipe.save(folder)
    file = folder / "stage0.py"
    for edit, wanted in (("tanh", torch.tanh), ("sin", torch.sin), ("cos", torch.cos)):
        file.write_text(re.sub(r"torch\.\w+\(linear\)", f"torch.{edit}(linear)", file.read_text()))
        loaded = fxpipe.load(folder, model)
        skip = wanted(model.first(X))
        torch.testing.assert_close(loaded(X), model.last(model.middle(skip) + skip))
        assert f"torch.{edit}" in loaded.stages[0].source
        loaded.close()


def test_a_loaded_package_captures_nothing(
    pipe: fxpipe.Pipe, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe.save(tmp_path / "out")

    def refuse(*args: object) -> None:
        raise AssertionError("captured")

    monkeypatch.setattr(CallCapture, "__init__", refuse)
    monkeypatch.setattr(CallCapture, "__call__", refuse)
    monkeypatch.setattr(CallCapture, "capture", refuse)
    loaded = fxpipe.load(tmp_path / "out", model)
    loaded(X).sum().backward()
    loaded.close()


def test_a_package_needs_only_what_runs(pipe: fxpipe.Pipe, model: nn.Module, tmp_path: Path) -> None:
    pipe.eval()
    pipe(X)
    pipe.save(tmp_path / "out")
    torch.save((model.state_dict(), X, pipe(X)), tmp_path / "data.pt")
    script = """
        import sys
        import torch

        class Refuse:
            def find_spec(self, name, path=None, target=None):
                parts, rooms = name.split("."), ("runtime", "engines", "torch_internals", "errors")
                if parts[0] == "fxpipe" and len(parts) > 1 and parts[1] not in rooms:
                    raise ImportError(f"{name} is not for packages")

        # fxpipe itself is its folder: the rooms without the compiler's front.
        import types
        fxpipe = types.ModuleType("fxpipe")
        fxpipe.__path__ = [sys.argv[1] + "/fxpipe"]
        sys.modules["fxpipe"] = fxpipe
        sys.meta_path.insert(0, Refuse())
        import out

        state, x, wanted = torch.load("data.pt")
        device = torch.device("cpu")
        scheduler = out.Scheduler([stage(state, {}, device) for stage in out.STAGES])
        found = out.result(*scheduler.run(out.inputs(x), out.CHUNKS))
        assert torch.equal(found, wanted)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(ROOT)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_loaded_package_is_for_one_kind_of_call(pipe: fxpipe.Pipe, model: nn.Module, tmp_path: Path) -> None:
    pipe.save(tmp_path / "out")
    loaded = fxpipe.load(tmp_path / "out", model)
    with pytest.raises(InputError, match="saved for another kind of call"):
        loaded(X, X)
    with pytest.raises(InputError, match="saved for another kind of call"):
        loaded(mask=X)
    assert loaded.train()(X[:3]).shape == (3, 8)
    loaded.close()


def test_a_loaded_package_is_for_one_mode(tmp_path: Path) -> None:
    """If the model does something else in the other."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    pipe = fxpipe.compile(model, devices=2, chunks=2, example_inputs=X)
    pipe.save(tmp_path / "out")
    loaded = fxpipe.load(tmp_path / "out", model)
    with pytest.raises(InputError, match=r"saved for training; save another one after pipe.train\(\) or pipe.eval\(\)"):
        loaded.eval()(X)
    loaded.close()
    pipe.close()


def test_a_package_that_is_none(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="is not a package that fxpipe has saved"):
        fxpipe.load(tmp_path, model)


def test_a_package_for_evaluation_of_a_model_that_does_the_same_in_training(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    pipe = fxpipe.compile(model, devices=2, chunks=2)
    pipe(X)
    pipe.eval()
    pipe(X)
    pipe.save(tmp_path / "out")
    loaded = fxpipe.load(tmp_path / "out", model)
    assert not loaded.training
    assert torch.equal(loaded(X), pipe(X))
    loaded.close()
    pipe.close()


# Plans ----------------------------------------------------------------------------------------------------------------


def test_a_plan_from_a_file(pipe: fxpipe.Pipe, model: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(plans.dump(pipe.plan))
    for plan in (file, str(file), pipe.plan):
        again = fxpipe.compile(model, plan=plan, example_inputs=X)
        assert again.plan == pipe.plan
        assert again.files == pipe.files
        again.close()
    with pytest.raises(PlanError, match="no plan can be read"):
        fxpipe.compile(model, plan=tmp_path / "other.json")


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"cut": [1, 4, 1]}, [2, 5, 1]),
        ({"cut": [4, 1, 1]}, [5, 2, 1]),
        ({"cut": ["middle.1", "drop"]}, [3, 2, 3]),
    ],
)
def test_balance_by_hand(model: nn.Module, options: dict[str, object], wanted: list[int]) -> None:
    pipe = fxpipe.compile(model, devices=3, chunks=4, example_inputs=X, **options)
    assert sizes(pipe) == wanted
    pipe.eval()
    torch.testing.assert_close(pipe(X), model(X))
    assert len(pipe.stages) == 3
    pipe.close()


class Lopsided(nn.Module):
    """Layers that cost much time and keep little, then layers that keep much."""

    def __init__(self) -> None:
        super().__init__()
        self.heavy = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        self.light = nn.Sequential(*[nn.Tanh() for _ in range(12)])

    def forward(self, x: Tensor) -> Tensor:
        return self.light(self.heavy(x))


def test_balance_by_memory_is_not_balance_by_time() -> None:
    cuts = {}
    for cut in ("time", "memory"):
        pipe = fxpipe.compile(Lopsided(), 2, 2, cut=cut, example_inputs=torch.ones(4096, 64))
        peaks = [max(held for _, held in steps) for steps in pipe.build.timeline.memory]
        cuts[cut] = sizes(pipe), max(peaks)
        pipe.close()
    assert cuts["time"][0] != cuts["memory"][0]
    assert cuts["memory"][1] < cuts["time"][1]


def test_a_measured_profile(model: nn.Module) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pipe = fxpipe.compile(model, devices=2, chunks=4, profile="measure")
    pipe(X)
    assert pipe.build.profile.source == "measured"
    assert "times measured for a micro-batch of 2" in pipe.explain()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    pipe.close()


def test_a_measured_profile_of_a_step() -> None:
    """How many labels count is known from the whole batch alone, and the loss has a tensor of its own."""
    loss = nn.CrossEntropyLoss(weight=torch.rand(8), ignore_index=0)
    pipe = fxpipe.compile(Net(), devices=2, chunks=4, profile="measure")
    pipe.step(X, target=torch.arange(8), loss_fn=loss)
    assert pipe.build.profile.source == "measured"
    pipe.close()


def test_predicted_beside_measured(model: nn.Module) -> None:
    pipe = fxpipe.compile(model, devices=2, chunks=4, checkpoint="always", schedule="1f1b", cut=["middle"])
    with pytest.raises(fxpipe.FxpipeError, match=r"call pipe.step\(..., timeline=True\) first"):
        pipe.compare()
    with pytest.raises(fxpipe.FxpipeError, match=r"call pipe.step\(..., timeline=True\) first"):
        pipe.diagnose()
    pipe.step(X, target=X, loss_fn=nn.functional.mse_loss, timeline=True)
    estimated = pipe.compare()
    found = pipe.diagnose()
    assert found.measured.seconds > pipe.timeline.makespan
    for parts in found.measured.parts.values():
        assert sum(parts.values()) == pytest.approx(found.measured.seconds)
        assert all(parts[part] > 0 for part in ("computing", "host"))
    assert found.measured.parts["cpu:0"]["recomputation"] > 0  # the last stage has its backward at once
    assert found.advice in str(found)
    titles = [line.split("  ")[0] for line in str(estimated).splitlines()[1:-1]]
    assert titles == [
        "step",
        "bubble",
        "cpu:0 busy",
        "cpu:1 busy",
        "cpu:0 kept for backward",
        "cpu:1 kept for backward",
    ]
    predicted = pipe.rehearse(X, target=X, loss_fn=nn.functional.mse_loss, rounds=1)
    rehearsed = pipe.compare()
    assert str(rehearsed).split("step ")[1].split("  ")[1:] != str(estimated).split("step ")[1].split("  ")[1:]
    assert pipe.compare() == rehearsed
    assert predicted.devices == pipe.timeline.devices
    # Three samples in four micro-batches are three: neither speaks of the fourth, and that was not rehearsed.
    pipe.step(X[:3], target=X[:3], loss_fn=nn.functional.mse_loss, timeline=True)
    assert {span.micro_batch for span in pipe.timeline.spans} == {0, 1, 2}
    assert pipe.compare() != rehearsed
    again = pipe.rehearse(X[:3], target=X[:3], loss_fn=nn.functional.mse_loss, rounds=1)
    assert {span.micro_batch for span in again.spans} == {0, 1, 2}
    pipe.close()


# The command ----------------------------------------------------------------------------------------------------------

MAKER = """
from torch import nn

def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def make_both():
    import torch
    return make_model(), (torch.ones(8, 4),)

def make_nothing():
    return 3
"""


@pytest.fixture
def maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    file = tmp_path / "maker.py"
    file.write_text(MAKER)
    return str(file)


def test_show(maker: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", f"{maker}:make_model", "f32[8, 4]", "--devices", "2", "--chunks", "4"]) == 0
    out = capsys.readouterr().out
    assert "Sequential: 2 stages, 4 micro-batches" in out
    for name in ("__init__.py", "stage0.py", "stage1.py", "scheduler.py", "plan.json"):
        assert f"----- {name} -" in out
    assert main(["show", f"{maker}:make_both", "--devices", "2"]) == 0
    assert capsys.readouterr().out.startswith("Sequential: 2 stages, 8 micro-batches")


def test_show_saves(maker: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", f"{maker}:make_both", "--devices", "2", "--save", str(tmp_path / "out")]) == 0
    assert str(tmp_path / "out") in capsys.readouterr().out
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    loaded = fxpipe.load(tmp_path / "out", model)
    torch.testing.assert_close(loaded(torch.ones(8, 4)), model(torch.ones(8, 4)))
    loaded.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}:make_model"], "give them as types, as in 'f32[8,3,32,32]'"),
        (["{}:make_model", "f99[1]"], "'f99[1]' is not an input"),
        (["{}:make_nothing"], "returned a int, not an nn.Module"),
        (["{}:other"], "has no function 'other'"),
        (["make_model"], "names no function"),
        (["nowhere.py:make_model"], "there is no file 'nowhere.py'"),
        (["{}:make_both", "--devices", "9"], "9 stages"),
    ],
)
def test_show_errors(maker: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["show", *(argument.replace("{}", maker) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("fxpipe: ")
    assert message in err
    assert not out


@pytest.mark.slow
def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    assert main(["demo", "--steps", "2", "--devices", "3", "--chunks", "2", "--out", str(tmp_path)]) == 0
    out, progress = capsys.readouterr()
    assert "U-Net, long skips" in progress
    differences = [float(found) for found in re.findall(r"largest relative difference (\S+)", out)]
    assert len(differences) == 2
    assert max(differences) < 1e-4
    for name in ("unet", "pixeltransformer"):
        ElementTree.parse(tmp_path / name / "timeline.svg")
        assert (tmp_path / name / "package" / "stage2.py").exists()


def test_a_cell_that_ends_with_a_result_shows_what_print_shows(pipe: fxpipe.Pipe, model: nn.Module) -> None:
    x = torch.randn(8, 8)
    cluster = fxpipe.Cluster.of(["cpu:0", "cpu:1"])
    planned = fxpipe.plan(model, cluster, 8, example_inputs=x, planner="straight")
    profiled = fxpipe.profile(model, x, device=cluster)
    best = fxpipe.plan(model, cluster, 8, example_inputs=x)
    assert str(best).splitlines()[-1] == best.certificate.proof
    assert str(best.certificate).startswith("proven optimal: no plan takes less than ")
    for value in (cluster, planned, profiled, profiled.first(1), planned.timeline, pipe.plan, pipe.schedule):
        assert repr(value) == str(value)


def test_the_nearest_attribute_is_told(pipe: fxpipe.Pipe) -> None:
    for name, near in (("expain", "explain"), ("time_line", "timeline"), ("leeds", "leads")):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'") as raised:
            getattr(pipe, name)
        assert raised.value.__notes__ == [f"did you mean {near!r} of the pipe?"]
    with pytest.raises(AttributeError) as raised:
        pipe.qqq  # noqa: B018
    assert not hasattr(raised.value, "__notes__")
