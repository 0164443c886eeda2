"""Text that would be code where it is pasted into source: in every string and key of every file that is read, and in
every name that a model has. None of it runs, and what cannot be used is an error of fxpipe."""

from __future__ import annotations

import ast
import builtins
import json
import linecache
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.api.cli.plan_commands import read_cluster
from fxpipe.codegen.package.load_package import load_package, unload
from fxpipe.errors import FxpipeError, PlanError
from fxpipe.ir import timeline as timelines
from fxpipe.ir.cluster import cluster as clusters
from fxpipe.ir.cluster.cluster import Cluster, Device
from fxpipe.ir.plan import profile as profiles
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.pipe.ranks.loaded_rank_pipe import table_of
from fxpipe.pipe.results import planned, searched
from fxpipe.schedules.make_schedule import make
from tests.helpers.marks import mostly_slow

RUN = "__import__('builtins').hostile.append(1)"
TEXTS = (
    f'cpu:0""";{RUN};x="""',
    f'cpu:0"); {RUN}; ("',
    f"cpu:0'); {RUN}; ('",
    f"cpu:0\n{RUN}\n#",
    f'\\"""\n{RUN}\n"""',
    f"{{{RUN}}}",
    f'"""\r{RUN}\x0c\u2028"""',
    "</svg><script>alert(1)</script>",
)


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ran: list[int] = []
    monkeypatch.setattr(builtins, "hostile", ran, raising=False)
    yield
    assert not ran


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


X, TARGET = torch.linspace(-1, 1, 16).view(4, 4), torch.zeros(4, 4)


def use(pipe: fxpipe.Pipe) -> None:
    """Make and run all that is generated."""
    try:
        pipe(X)
        pipe.step(X, target=TARGET, loss_fn=nn.functional.mse_loss)
        for text in (pipe.explain(), pipe._repr_svg_(), str(pipe.plan)):
            assert "<script>" not in text
    finally:
        pipe.close()


# Files ----------------------------------------------------------------------------------------------------------------


def small() -> Cluster:
    return Cluster.of(["cpu:0", "cpu:1"])


def plan_file(folder: Path) -> tuple[str, Callable[[Path], None]]:
    pipe = fxpipe.compile(net(), 2, 2, example_inputs=X)
    text = pipe.files["plan.json"]
    pipe.close()
    return text, lambda path: use(fxpipe.compile(net(), plan=path))


def planned_file(folder: Path) -> tuple[str, Callable[[Path], None]]:
    def load(path: Path) -> None:
        found = planned.load(path)
        assert "<script>" not in found.draw(folder / "found.html").read_text()
        str(found), found.text(), found.trace()

    fxpipe.plan(net(), small(), 4, example_inputs=X, planner="straight").save(folder / "planned.json")
    return (folder / "planned.json").read_text(), load


def strategy_file(folder: Path) -> tuple[str, Callable[[Path], None]]:
    def load(path: Path) -> None:
        found = searched.load(path)
        assert "<script>" not in found.draw(folder / "found.html").read_text()
        assert "<script>" not in found.timeline._repr_svg_()
        use(fxpipe.compile(net(), 2, plan=path))

    graph = fxpipe.search(net(), small(), example_inputs=X, budget=0.01)
    return graph.dump(), load


def cluster_file(folder: Path) -> tuple[str, Callable[[Path], None]]:
    def load(path: Path) -> None:
        found = read_cluster(str(path))
        str(found)
        use(fxpipe.compile(net(), found, 2))

    return clusters.dump(small()), load


def profile_file(folder: Path) -> tuple[str, Callable[[Path], None]]:
    def load(path: Path) -> None:
        try:
            found = profiles.load(path.read_text())
        except ValueError as error:
            raise FxpipeError(str(error)) from None
        use(fxpipe.compile(net(), 2, 2, profile=found))

    return profiles.dump(fxpipe.profile(net(), X)), load


def timeline_file(folder: Path) -> tuple[str, Callable[[Path], None]]:
    def load(path: Path) -> None:
        try:
            str(timelines.load(path.read_text()))
        except ValueError as error:
            raise FxpipeError(str(error)) from None

    return timelines.dump(timelines.even(make("1f1b", ("cpu:0", "cpu:1"), 2))), load


def messages_file(folder: Path) -> tuple[str, Callable[[Path], None]]:
    pipe = fxpipe.compile(net(), 2, 2)
    pipe.step(X, target=TARGET, loss_fn=nn.functional.mse_loss)
    pipe.save(folder / "package")
    pipe.close()
    package = load_package(folder / "package")
    file = folder / "package" / "messages.json"
    text = file.read_text()

    def load(path: Path) -> None:
        file.write_text(path.read_text())
        table_of(package)

    unload(package)
    return text, load


FILES = (plan_file, planned_file, strategy_file, cluster_file, profile_file, timeline_file, messages_file)


def places(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all values in data; of lists of many alike, the first two."""
    yield at
    items = data.items() if isinstance(data, dict) else enumerate(data[:2]) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*at, key))


def changed(data: Any, at: tuple[Any, ...], change: Callable[[Any, Any], None]) -> str:
    """The text after a change to what holds the last of the way."""
    fresh = json.loads(json.dumps(data))
    holder = fresh
    for key in at[:-1]:
        holder = holder[key]
    change(holder, at[-1])
    return json.dumps(fresh)


def hostile(data: Any) -> Iterator[str]:
    """The file with hostile text in the place of each string and of each key."""
    for number, at in enumerate(way for way in places(data) if way):

        def value(holder: Any, key: Any, text: str = TEXTS[number % len(TEXTS)]) -> None:
            holder[key] = text

        def key(holder: Any, key: Any, text: str = TEXTS[(number + 3) % len(TEXTS)]) -> None:
            holder[text] = holder.pop(key)

        yield changed(data, at, value)
        if isinstance(at[-1], str):
            yield changed(data, at, key)


@pytest.mark.parametrize("make_file", mostly_slow(FILES, [plan_file, cluster_file, timeline_file].__contains__))
def test_no_text_of_a_file_runs(make_file: Callable[[Path], tuple[str, Any]], tmp_path: Path) -> None:
    text, load = make_file(tmp_path)
    path, refused = tmp_path / "hostile.json", list[int]()
    path.write_text(text)
    load(path)
    cases = list(hostile(json.loads(text)))
    for case in cases:
        path.write_text(case)
        try:
            load(path)
        except FxpipeError as error:
            refused.append(len(str(error)))
    assert len(refused) > len(cases) / 2
    assert max(refused) < 2000


WRONG = (None, 2.5, "2", -1, 10**9, 10**30, True, [], {}, [[[]]], "")


@pytest.mark.parametrize("make_file", mostly_slow(FILES, [plan_file, timeline_file, messages_file].__contains__))
def test_values_of_other_types_are_refused(make_file: Callable[[Path], tuple[str, Any]], tmp_path: Path) -> None:
    text, load = make_file(tmp_path)
    path, data, refused = tmp_path / "wrong.json", json.loads(text), list[int]()
    for number, at in enumerate(way for way in places(data) if way):
        for value in (WRONG[number % len(WRONG)], WRONG[(number * 3 + 5) % len(WRONG)]):
            path.write_text(changed(data, at, lambda holder, key, value=value: holder.__setitem__(key, value)))
            try:
                load(path)
            except FxpipeError as error:
                refused.append(len(str(error)))
    assert max(refused) < 2000
    for odd in ("", "[]", "3", "null", "[" * 100_000, text[:-10], text.replace("0", "NaN"), '{"a": 1, "a": 1}'):
        path.write_text(odd)
        with pytest.raises(FxpipeError):
            load(path)


def test_values_made_in_a_program_are_checked_as_those_of_files() -> None:
    label = TEXTS[0]
    stage = StagePlan(("input",), label, "never")
    for options in (
        {"plan": Plan("Sequential", (stage,), 1)},
        {"devices": Cluster((Device(label, 1, 1, 1),)), "chunks": 1},
        {"devices": [label], "chunks": 1},
        {"devices": 2, "plan": Plan("Sequential", (stage,), 1)},
        {"plan": Plan("Sequential", (StagePlan(("input",), "cpu:0", "often"),), 1)},
        {"plan": Plan("Sequential", (StagePlan(("input",), "cpu:0", "never"),), 2.5)},  # type: ignore[arg-type]
        {"plan": 3},
        {"devices": 2, "chunks": 10**9},
    ):
        with pytest.raises(PlanError, match=r"^(plan|devices|chunks|'cpu)") as found:
            fxpipe.compile(net(), **options)
        assert "\n" not in str(found.value)
    with pytest.raises(PlanError):
        fxpipe.plan(net(), Cluster((Device(label, 1, 1, 1),)), 4, example_inputs=X)


# Models ---------------------------------------------------------------------------------------------------------------

SOURCE = '''
def forward(self, x):
    y = {}
    for name, module in self.named_children():
        x = module(x).relu() + self.get_parameter(self.odd)  # """ \\\\ %s
    return {self.key: x, "rest": (x * 2,)}
'''


@pytest.mark.parametrize("text", mostly_slow(TEXTS, [*TEXTS][::2].__contains__))
def test_no_name_of_a_model_runs(text: str) -> None:
    """Its class, its file, its modules, parameters and keys, and the comments of its lines."""
    name = text.replace(".", "_")  # which no module may have in its name

    def __init__(self: Any) -> None:
        nn.Module.__init__(self)
        self.odd, self.key = name, text
        for number in range(3):
            self.add_module(f"{name}{number}", nn.Linear(4, 4))
        self.register_parameter(name, nn.Parameter(torch.ones(4)))

    source = SOURCE % text.replace("\n", " ").replace("\r", " ").replace("\x0c", " ")
    scope: dict[str, Any] = {}
    exec(compile(source, text, "exec"), scope)
    linecache.cache[text] = (len(source), None, source.splitlines(True), text)
    kind = type(text, (nn.Module,), {"__init__": __init__, "forward": scope["forward"]})
    torch.manual_seed(0)
    model = kind()
    want = model(X)
    pipe = fxpipe.compile(model, 2, 2)
    try:
        got = pipe(X)
        torch.testing.assert_close(got, want)
        loss = pipe.step(X, target=TARGET, loss_fn=lambda out, target: (out[text] - target).square().mean())
        torch.testing.assert_close(loss, want[text].square().mean())
        for file, source in pipe.files.items():
            if file.endswith(".py"):
                ast.parse(source)
    finally:
        pipe.close()
        linecache.cache.pop(text, None)
