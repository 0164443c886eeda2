"""torch.compile(model, backend="fxpipe") is the model: outputs, all gradients and buffers, in every graph it makes."""

from __future__ import annotations

import sys
import tomllib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fxpipe
from fxpipe import backend as door
from fxpipe.errors import PlanError
from tests.helpers.marks import mostly_slow
from tests.helpers.models import MODELS
from tests.helpers.transparency import assert_same, build, inputs, plain, step

ROOT = Path(__file__).parents[2]
OPTIONS = {"devices": 2, "chunks": 4}
BATCHES = (10, 7)  # sizes that nothing else in the models has
# In these, the model asks how large the batch is, and torch.compile's answer to the first call is a number.
NUMBERED = {
    "tied transformer", "random draws", "attention dropout", "numbers", "flatten time", "masked", "positions",
    "class token", "lstm by hand", "counter", "running max", "queue",
}  # fmt: skip
# The new contents of the buffer are an output of the graph, exact for the whole batch.
EXACT = {"moving average"}
PLAIN = {"lstm"}  # torch.compile leaves torch's LSTM alone
QUICK = {
    ("numbers", 4, None), ("numbers", 4, True), ("nested outputs", 4, None), ("own function", 4, None),
    ("dropout", 1, True), ("counter", 4, None), ("dict output", 4, True),
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    door.living.clear()
    yield
    torch._dynamo.reset()


def compiled(model: Any, dynamic: bool | None = None, fullgraph: bool = False, **options: Any) -> Any:
    return torch.compile(
        model, backend=door.backend, dynamic=dynamic, fullgraph=fullgraph, options={**OPTIONS, **options}
    )


@contextmanager
def warned() -> Iterator[list[str]]:
    """What fxpipe warned of inside."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(w.message) for w in caught if "of torch.compile" in str(w.message)]


def ways() -> list[tuple[str, int, int]]:
    """Batch, stages and micro-batches of every graph so far, in the order of the graphs."""
    return [
        door.row(made, sizes, way)[3:6] for _, made in sorted(door.living.items()) for sizes, way in made.ways.items()
    ]


def cases() -> list[Any]:
    """All models but the deepest in four micro-batches: those that differ in whether sizes are symbols from the first
    call on, in both ways, and the others in either way in turn. In one micro-batch, every fourth model."""
    names = [name for name in MODELS if name != "amoebanet"]
    either = {name: (None, True)[index % 2] for index, name in enumerate(names)}
    found = [
        (name, 4, way) for name in names for way in (None, True) if name in NUMBERED | EXACT or way == either[name]
    ]
    found += [(name, 1, (None, True)[index % 8 == 4]) for index, name in enumerate(names) if index % 4 == 0]
    found += sorted(QUICK - {*found}, key=str)
    return mostly_slow(found, QUICK.__contains__, every=3)


@pytest.mark.parametrize(("name", "chunks", "dynamic"), cases())
def test_what_is_compiled_is_the_model(name: str, chunks: int, dynamic: bool | None) -> None:
    """The second batch is of another size: torch.compile makes a symbol of it."""
    case = MODELS[name]
    model, twin = build(case), build(case)
    options = {key: case.options[key] for key in ("reduce", "batch_dim") if key in case.options}
    made = compiled(twin, dynamic, chunks=chunks, **options)
    for turn, batch in enumerate(BATCHES):
        one = turn == 0 and dynamic is None and name in NUMBERED
        cut = 1 if one or name in EXACT or name in PLAIN else chunks
        torch.manual_seed(batch)
        wanted = plain(case, model, *inputs(case, batch), cut)
        torch.manual_seed(batch)
        with warned() as found:
            got = step(case, twin, made, *inputs(case, batch))
        assert_same(got, wanted)
        if name not in PLAIN:
            assert ways()[-1] == (str(batch), 2, 1 if one else chunks)
            assert bool(found) == (one and chunks > 1)
            assert all("is a number in this graph; write torch.compile(..., dynamic=True)" in text for text in found)
    assert list(made.state_dict()) == [f"_orig_mod.{key}" for key in model.state_dict()]


class Net(nn.Module):
    """Two layers, a batch norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))


def net(kind: type[nn.Module] = Net) -> tuple[nn.Module, nn.Module]:
    """The same model twice."""
    model, twin = kind().double(), kind().double()
    twin.load_state_dict(model.state_dict())
    return model, twin


class Numbers(nn.Module):
    """Has two numbers, of which dynamic=True makes symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale, self.rate = 2.0, 0.25

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(self.first(x) * self.scale, self.rate, training=False))


def rows(batch: int) -> Tensor:
    return torch.randn(batch, 6, dtype=torch.float64)


def agree(model: Any, twin: Any, made: Any, *args: Any) -> None:
    """Output and gradients of both."""
    for one in (model, twin):
        one.zero_grad()
    expected, got = model(*args), made(*args)
    assert torch.allclose(got, expected, rtol=1e-9, atol=1e-12)
    expected.sin().sum().backward()
    got.sin().sum().backward()
    for wanted, parameter in zip(model.parameters(), twin.parameters(), strict=True):
        assert (wanted.grad is None) == (parameter.grad is None)
        assert wanted.grad is None or torch.allclose(parameter.grad, wanted.grad, rtol=1e-9, atol=1e-12)


def test_symbolic_numbers_are_told_apart() -> None:
    model, twin = net(Numbers)
    made = compiled(twin, True, chunks=1)
    agree(model, twin, made, rows(8))
    assert ways()[-1] == ("8", 2, 1)


def test_recompiles_are_those_of_torch_compile() -> None:
    """A number, then a symbol; again for eval: four graphs, whatever comes."""
    model, twin = net()
    made = compiled(twin)
    for batch in (9, 8, 10, 12):
        made(rows(batch)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 2
    model.load_state_dict(twin.state_dict())
    for one in (model, twin):
        one.eval()
    for batch in (9, 7, 5, 12, 3):
        agree(model, twin, made, rows(batch))
    assert counters["stats"]["unique_graphs"] == 3
    assert ways() == [
        ("9", 2, 4), ("8", 2, 4), ("10", 2, 4), ("12", 2, 4),
        ("9", 2, 4), ("7", 2, 4), ("5", 2, 4), ("12", 2, 4), ("3", 2, 3),
    ]  # fmt: skip


def test_a_batch_of_one_is_one_micro_batch() -> None:
    model, twin = net()
    for one in (model, twin):
        one.eval()
    made = compiled(twin)
    with warned() as found:
        agree(model, twin, made, rows(1))
    assert ways() == [("1", 2, 1)]
    assert not found


class Broken(nn.Module):
    """torch.compile cannot read what is between the two halves, which uses the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.end = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        x = self.start(x)
        torch._dynamo.graph_break()
        x = x * 2
        torch._dynamo.graph_break()
        return self.end(x).view(count, 3)


@pytest.mark.parametrize("dynamic", [None, True])
def test_each_graph_that_is_worth_it_is_a_pipeline(dynamic: bool | None) -> None:
    model, twin = net(Broken)
    made = compiled(twin, dynamic)
    for batch in (9, 7):
        with warned():
            agree(model, twin, made, rows(batch))
    report = door.report()
    assert "0 of 1 ops read parameters, which is too few for 2 stages" in report
    assert "test_backend.py" in report
    assert ("7", 2, 4) in ways()
    assert ("7", "", "") in ways()


class Mean(Net):
    """One number over the batch: a mean of the samples'."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


def test_a_whole_graph() -> None:
    model, twin = net(Mean)
    agree(model, twin, compiled(twin, fullgraph=True), rows(9))
    assert ways() == [("9", 2, 4)]
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(Broken(), fullgraph=True)(torch.randn(9, 6))


def test_an_optimizer_is_seen() -> None:
    model, twin = net()
    made = compiled(twin)
    steps = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin)]
    for one in (model, twin):
        one.eval()
    for _ in range(3):
        agree(model, twin, made, rows(8))
        for optimizer in steps:
            optimizer.step()


def test_other_parameters_in_their_place_are_seen() -> None:
    model, twin = net()
    for one in (model, twin):
        one.eval()
    made = compiled(twin)
    agree(model, twin, made, rows(8))
    weight = torch.randn(3, 6, dtype=torch.float64)
    for one in (model, twin):
        one.second.weight = nn.Parameter(weight.clone())
    agree(model, twin, made, rows(8))


class Constant(nn.Module):
    """A plain tensor, a global one, a number and a tensor in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.shift = torch.ones(6, dtype=torch.float64)

    def forward(self, x: Tensor, scale: float, more: dict[str, Tensor]) -> Tensor:
        return self.second((self.first(x) + self.shift + SHIFT + more["y"]) * scale)


SHIFT = torch.full((6,), 0.5, dtype=torch.float64)


def test_constants_and_numbers_that_change_are_seen() -> None:
    model, twin = net(Constant)
    made = compiled(twin)
    for turn in range(4):
        agree(model, twin, made, rows(8), 0.5 + turn, {"y": rows(8)})
        for one in (model, twin):
            one.shift = torch.full((6,), turn + 2.0, dtype=torch.float64)
    assert ways()[-1] == ("8", 2, 4)


def test_without_gradients() -> None:
    model, twin = net()
    for one in (model, twin):
        one.eval()
    made = compiled(twin)
    x = rows(8)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = made(x)
        assert not got.requires_grad
        assert torch.allclose(got, model(x))


class Mixed(nn.Module):
    """Every sample sees every other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x - x.mean(0))


class Part(Mixed):
    """Takes half of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x[: x.shape[0] // 2]))


class Looked(Mixed):
    """Looks samples up by number, in an order that a tensor says."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)[ORDER])


ORDER = torch.tensor([0, 1] * 4)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kind", [Mixed, Part, Looked])
def test_what_must_not_be_cut_is_not(kind: type[nn.Module], dynamic: bool | None) -> None:
    model, twin = net(kind)
    made = compiled(twin, dynamic)
    with warned() as found:
        agree(model, twin, made, rows(8))
    assert ways() == [("8", 2, 1)]
    assert "runs in one micro-batch" in found[0]
    assert "test_backend.py" in found[0]


class Two(Mixed):
    """The second argument is for all samples."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.second(self.first(x) * mask)


def test_what_has_no_batch_is_said() -> None:
    model, twin = net(Two)
    mask = torch.randn(6, dtype=torch.float64)
    with warned() as found:
        agree(model, twin, compiled(twin), rows(8), mask)
    assert "batch_dim={'mask': None}" in found[0]
    agree(model, twin, compiled(twin, batch_dim={"mask": None}), rows(8), mask)
    assert ways()[-1] == ("8", 2, 4)


class MaskedMean(Mixed):
    """What it divides by is of the whole batch, and weighed by a plain tensor."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (self.second(self.first(x)).square().sum(1) * mask).sum() / (mask * SHIFT[0]).sum()


def test_what_must_be_known_of_the_whole_batch() -> None:
    model, twin = net(MaskedMean)
    made = compiled(twin)
    for batch in (9, 7):
        agree(model, twin, made, rows(batch), torch.arange(batch).double())
    assert ways() == [("9", 2, 4), ("7", 2, 4)]


def test_a_function_of_two_models_with_their_loss() -> None:
    models = [net() for _ in range(2)]
    x = rows(9)

    def loss(one: nn.Module, other: nn.Module, x: Tensor) -> Tensor:
        return (one(x) - other(x)).square().mean()

    for pair in models:
        for one in pair:
            one.eval()
    twins = [twin for _, twin in models]
    loss(models[0][0], models[1][0], x).backward()
    compiled(loss)(*twins, x).backward()
    assert ways() == [("9", 2, 4)]
    for model, twin in models:
        for wanted, parameter in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(parameter.grad, wanted.grad, rtol=1e-9, atol=1e-12)


def test_autocast_around_the_call() -> None:
    model, twin = net()
    for one in (model, twin):
        one.float().eval()
    x = torch.randn(8, 6)
    made = compiled(twin)
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = model(x), made(x)
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got, expected, atol=1e-2)


@pytest.mark.cuda
@pytest.mark.parametrize("home", ["cpu", "cuda:0"])
def test_nothing_moves(home: str) -> None:
    """Stages elsewhere have copies: of weights that an optimizer changed, of buffers that they write."""
    model, twin = (one.to(home) for one in net())
    made = compiled(twin, devices=["cpu", "cuda:0"], chunks=1)
    steps = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin)]
    for _ in range(3):
        agree(model, twin, made, rows(8).to(home))
        assert made(rows(8).to(home)).device == torch.device(home)
        model(rows(8).to(home))
        twin.norm.load_state_dict(model.norm.state_dict())
        for optimizer in steps:
            optimizer.step()
    assert {tensor.device for tensor in twin.state_dict().values()} == {torch.device(home)}
    assert len(door.living) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 4}, r"the backend fxpipe has no option 'chunk'; did you mean 'chunks'\?"),
        ({"color": 4}, r"the backend fxpipe has no option 'color'; it has devices, chunks"),
        ({"warmup": (2, 1)}, "warmup is an option of fxpipe.compile alone; the backend has devices, chunks"),
        ({"chunks": 0}, r"chunks is 0: write a whole number from 1 to 4096, as in chunks=8"),
        ({"devices": 0}, r"devices is 0: write a count"),
        (
            {"checkpoint": "sometimes"},
            r"checkpoint is 'sometimes': write 'auto', 'never', 'selective', 'except_last', 'always', or a set",
        ),
        ({"checkpoint": {5}}, r"checkpoint names the stages \[5\]"),
        ({"schedule": "1f1b"}, r"schedule is '1f1b': .* GPipe's order; .*fxpipe.compile\(model.*pipe.step"),
        ({"plan": "missing.json"}, r"no plan can be read from 'missing.json'"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        compiled(Net(), **options)(torch.randn(8, 6))


def test_how_many_must_be_said() -> None:
    with pytest.raises(PlanError, match=r"say how many, as in torch\.compile"):
        torch.compile(Net(), backend=door.backend)(torch.randn(8, 6))
    with pytest.raises(PlanError, match="has no modes"):
        torch.compile(Net(), backend=door.backend, mode="reduce-overhead")(torch.randn(8, 6))


def test_a_plan() -> None:
    model, twin = net()
    for one in (model, twin):
        one.eval()
    agree(model, twin, compiled(twin), rows(9))
    (made,) = door.living.values()
    live = next(iter(made.ways.values())).live
    assert live is not None
    plan = live.build.plan
    torch._dynamo.reset()
    again = torch.compile(twin, backend=door.backend, options={"plan": plan})
    agree(model, twin, again, rows(9))
    assert ways()[-1] == ("9", 2, 4)


def test_a_strategy() -> None:
    model, twin = net()
    for one in (model, twin):
        one.eval()
    plan = fxpipe.search(twin, fxpipe.Cluster.of(["cpu:0", "cpu:1"]), example_inputs=rows(8), budget=0.1)
    agree(model, twin, torch.compile(twin, backend=door.backend, options={"plan": plan}), rows(8))


def test_torch_lists_it() -> None:
    """Once it is installed; here the entry point is read from the project's own file."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch_dynamo_backends"]
    assert EntryPoint("fxpipe", points["fxpipe"], "torch_dynamo_backends").load() is door.backend


@pytest.mark.slow
def test_torch_lists_it_where_it_is_installed(tmp_path: Path) -> None:
    target = tmp_path / "site"
    where = ["--no-deps", "--no-build-isolation", "--target", str(target), str(ROOT)]
    run([sys.executable, "-m", "pip", "install", "-q", *where], check=True)
    code = 'import torch; print("fxpipe" in torch.compiler.list_backends()); torch._dynamo.lookup_backend("fxpipe")'
    found = run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(target)}, capture_output=True)
    assert found.stdout.strip() == b"True", found.stderr.decode()
