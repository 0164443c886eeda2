"""Methods that cannot be traced, kept whole by themselves: the layers of their module are cut into stages."""

import copy
import re
import threading
import warnings

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.ir.graph.opaque_call import Opaque, opaques
from tests.capture.batch.test_counted_rows import GRIDS, IMAGE, LENGTH, ROWS, batch, token_loss
from tests.capture.batch.test_sample_lists import is_step_of
from tests.helpers.marks import mostly_slow

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* kept whole"),
    pytest.mark.filterwarnings("error::fxpipe.errors.MixedSamplesWarning"),
]
WIDTH = 8


class Visual(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.act, self.leave = nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)

    def forward(self, patches):
        return self.leave(self.act(self.enter(patches)))


class Reader(nn.Module):
    """A text with places for images: two methods read values of inputs, one of them with a submodule and a parameter;
    a layer of forward's own follows, and then the body."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(20, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.visual, self.act, self.newline = Visual(), nn.ReLU(), nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head, self.deltas = nn.Linear(WIDTH, 5), None

    def positions(self, ids):
        made = torch.zeros_like(ids)
        for sample, row in zip(made, ids, strict=True):
            at = 0
            for place, word in enumerate(row.tolist()):
                sample[place] = at
                at += 2 if word == 3 else 1
        return made, made.amax(1, keepdim=True) + 1

    def features(self, patches, grid):
        found = self.act(self.visual(patches)) + self.newline
        return {"found": torch.split(found, grid.prod(-1).tolist()), "of": "images"}

    def embedded(self, ids, patches, grid):
        x = self.words(ids)
        found = torch.cat(self.features(patches, grid)["found"], dim=0)
        return x.masked_scatter((ids == IMAGE).unsqueeze(-1).expand_as(x), found)

    def forward(self, ids, patches, grid):
        x = self.embedded(ids, patches, grid)
        positions, self.deltas = self.positions(ids)
        x = x + self.places(positions)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Inside(nn.Module):
    """The same as a part of a model."""

    def __init__(self):
        super().__init__()
        self.model = Reader()
        self.head, self.model.head = self.model.head, nn.Identity()

    def forward(self, ids, patches, grid):
        return self.head(self.model(ids, patches, grid))


def compiled(model, **options):
    torch.manual_seed(0)
    return fxpipe.compile(copy.deepcopy(model), **{"devices": 3, "chunks": 2, "batch_dim": ROWS} | options)


def made(kind, **options):
    torch.manual_seed(1)
    model = kind().double()
    return model, compiled(model, **options)


def steps(model, pipe, grids=GRIDS):
    given = batch(grids, len(grids))
    expected = token_loss(model(*given), given[0])
    is_step_of(model, pipe, expected, pipe.step(*given, target=given[0], loss_fn=token_loss))


def kept(pipe):
    """What is kept whole, with the tensors that it is given."""
    return {opaque.called: opaque.names for opaque in opaques(pipe.build.graph)}


VISUAL = tuple(f"visual.{layer}.{name}" for layer in ("enter", "leave") for name in ("weight", "bias"))
METHODS = {"features": ("newline", *VISUAL), "positions": ()}

WAYS = {
    "gpipe": {"chunks": 2},
    "1f1b": {"chunks": 3, "schedule": "1f1b"},
    "single samples": {"chunks": 5, "schedule": "interleaved", "devices": 2, "stages_per_device": 2},
    "code": {"chunks": 3, "schedule": "zb-h1", "backward": "code"},
    "recomputed": {"chunks": 2, "checkpoint": "always", "schedule": "1f1b"},
    "replicas": {"chunks": 2, "devices": 3, "replicas": (1, 2)},
    "uncut": {"chunks": 1},
}


@pytest.mark.parametrize("way", mostly_slow(WAYS, lambda way: way == "1f1b"))
@pytest.mark.parametrize("kind", mostly_slow([Reader, Inside], [Inside].__contains__))
def test_steps_are_those_of_the_model(kind, way):
    """Also with another number of samples and of patches, with calls between the steps."""
    model, pipe = made(kind, **WAYS[way])
    inner, own = (model, pipe.model) if kind is Reader else (model.model, pipe.model.model)
    for grids in (GRIDS, (*GRIDS[::-1], (2, 4)), GRIDS):
        steps(model, pipe, grids)
        torch.testing.assert_close(own.deltas, inner.deltas)
        given = batch(grids, len(grids))
        pipe.eval(), model.eval()
        with torch.no_grad():
            torch.testing.assert_close(pipe(*given), model(*given))
        pipe.train(), model.train()
    assert len(pipe.stages) == len(pipe.plan.stages) > 1
    if way == "uncut":  # what forward reads is known then
        return
    at = "" if kind is Reader else "model."
    assert kept(pipe) == {f"{at}{method}": names for method, names in METHODS.items()}
    read = {name for op in pipe.build.graph.ops if not isinstance(op.target, Opaque) for name in op.reads}
    paths = {state.path for state in pipe.build.graph.states if state.name in read}
    assert {path for path, _ in model.named_parameters()} - paths == {f"{at}{name}" for name in METHODS["features"]}


def test_the_code_calls_the_methods():
    model, pipe = made(Inside)
    with pytest.warns(UserWarning, match=r"model\.features is kept whole: one opaque op"):
        steps(model, pipe)
    text = "".join(stage.source for stage in pipe.stages)
    assert "self.model.positions(ids)" in text
    assert re.search(r"(found|features), \w+_vjp = self\.model\.features\.vjp\(\([\d, ]+\)\)\(", text)


@pytest.mark.parametrize("kind", mostly_slow([Reader, Inside], [Reader].__contains__))
def test_a_saved_package_calls_the_methods(kind, tmp_path):
    model, pipe = made(kind)
    given = batch(GRIDS)
    with torch.no_grad():
        expected = pipe(*given)
    pipe.save(tmp_path / "out")
    loaded = fxpipe.load(tmp_path / "out", model)
    torch.testing.assert_close(loaded(*given), expected)
    torch.testing.assert_close(loaded(*batch(GRIDS[::-1])), model(*batch(GRIDS[::-1])))


def test_what_changes_between_steps_is_heeded():
    model, pipe = made(Reader)
    steps(model, pipe)
    for one in (model, pipe.model):
        one.visual.enter.weight.requires_grad_(False)
    steps(model, pipe)
    torch.manual_seed(2)
    layer = nn.Linear(WIDTH, WIDTH).double()
    for one in (model, pipe.model):
        one.visual.leave = copy.deepcopy(layer)
    steps(model, pipe)
    for one in (model, pipe.model):
        one.visual.leave, one.newline = nn.Identity(), nn.Parameter(torch.ones(WIDTH).double())
    steps(model, pipe)
    assert kept(pipe)["features"] == ("newline", *VISUAL[:2])


class Shares(Reader):
    """A method uses tensors that forward uses, and another one writes a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def positions(self, ids):
        self.seen += 1
        self.seen = self.seen * 2
        return super().positions(ids)

    def features(self, patches, grid):
        found = self.visual(patches) + self.words.weight[0] + self.head.bias.sum()
        return {"found": found.split(grid.prod(-1).tolist())}


@pytest.mark.parametrize("checkpoint", mostly_slow(["never", "always"], "always".__eq__))
def test_tensors_of_forward_and_buffers_are_used_in_a_method(checkpoint):
    model, pipe = made(Shares, checkpoint=checkpoint)
    for grids, seen in ((GRIDS, 6), (GRIDS[::-1], 30)):  # twice for each micro-batch, and 1 more
        steps(model, pipe, grids)
        assert pipe.model.seen == seen
    assert kept(pipe) == {"positions": ("seen",), "features": ("words.weight", *VISUAL, "head.bias")}
    assert len(pipe.stages) > 1


class Sets(Reader):
    """The inner method sets an attribute, which the outer one does not see; the outer one is all of forward's start."""

    def features(self, patches, grid):
        self.last = grid.prod(-1).tolist()
        return super().features(patches, grid)


class ReturnsNumbers(Reader):
    def numbers(self, ids):
        return [row.count(3) for row in ids.tolist()]

    def positions(self, ids):
        return torch.tensor(self.numbers(ids))[:, None] + 0 * ids, ids


class UsesAll(Reader):
    def features(self, patches, grid):
        found = super().features(patches, grid)["found"]
        weight = sum(x.sum() for x in self.parameters())
        return {"found": [one + 0 * weight for one in found]}


class Walks(Reader):
    """Counts its submodules, in which what is not used would be missing."""

    def features(self, patches, grid):
        found = super().features(patches, grid)["found"]
        return {"found": [one * len([*self.modules()]) for one in found]}


class Looks(Reader):
    """Forward looks into the list."""

    def embedded(self, ids, patches, grid):
        found = [one.mean(0) for one in self.features(patches, grid)["found"]]
        return self.words(ids) + torch.stack(found).unsqueeze(1)


@pytest.mark.parametrize(
    ("kind", "expected"),
    mostly_slow(
        [
            (Sets, {""}),
            (ReturnsNumbers, {"features", "positions"}),
            (UsesAll, {""}),
            (Walks, {""}),
            (Looks, {"embedded", "positions"}),
        ],
        lambda row: row[0] in (Sets, Looks),
    ),
)
def test_what_cannot_be_a_method_is_kept_in_what_is_around_it(kind, expected):
    model, pipe = made(kind)
    steps(model, pipe)
    assert kept(pipe).keys() == expected
    steps(model, pipe, GRIDS[::-1])


LOCK = threading.Lock()
MOST = 4
ALIKE, MIXED = ((2, 2),) * 5, ((2, 2), (1, 3), (1, 1), (2, 4), (1, 4))


class Cropped(Reader):
    """Values of the grid decide how many rows an image has in the text: at most four."""

    def features(self, patches, grid):
        with LOCK:
            found = super().features(patches, grid)["found"]
            return {"found": [one[:MOST] for one in found], "levels": (self.newline * 0, self.newline * 2)}


class Mean(Cropped):
    """Forward looks into a list, too, of which it knows how many items it has."""

    def embedded(self, ids, patches, grid):
        made = self.features(patches, grid)
        x, levels = self.words(ids), made["levels"]
        x = x + (levels[0] + levels[1]).mean()
        return x.masked_scatter((ids == IMAGE).unsqueeze(-1).expand_as(x), torch.cat(made["found"]))


class Counts(Cropped):
    """And into one whose items are of several lengths."""

    def embedded(self, ids, patches, grid):
        found = self.features(patches, grid)["found"]
        return self.words(ids) + sum(one.mean(0) for one in found)


def cropped(grids):
    ids, patches, grid = batch(grids, len(grids))
    for row, (height, width) in zip(ids, grids, strict=True):
        row[1 + MOST : 1 + height * width] = 7
    return ids, patches, grid


@pytest.mark.parametrize("way", mostly_slow(WAYS, "gpipe".__eq__))
@pytest.mark.parametrize("order", [pytest.param((ALIKE, MIXED, MIXED[::-1]), marks=pytest.mark.slow), (MIXED, ALIKE)])
def test_only_a_run_tells_how_long_the_items_of_a_list_are(order, way):
    model, pipe = made(Cropped, **WAYS[way])
    for grids in order:
        given = cropped(grids)
        expected = token_loss(model(*given), given[0])
        is_step_of(model, pipe, expected, pipe.step(*given, target=given[0], loss_fn=token_loss))
        with torch.no_grad():
            torch.testing.assert_close(pipe(*given), model(*given))
    assert "features" in kept(pipe)
    assert len(pipe.plan.stages) > 1


def test_items_that_depend_on_other_samples_are_told():
    class Mixes(Cropped):
        def features(self, patches, grid):
            found = super().features(patches, grid)["found"]
            return {"found": [one + found[-1].mean() for one in found]}

    _, pipe = made(Mixes)
    with pytest.warns(
        fxpipe.MixedSamplesWarning, match="what Mixes.features, kept whole, returns for a sample depends"
    ):
        pipe(*cropped(MIXED))


@pytest.mark.parametrize("kind", mostly_slow([Mean, Counts], [Counts].__contains__))
def test_forward_looks_into_lists_if_no_call_is_cut(kind):
    model, pipe = made(kind, chunks=1)
    given = cropped(MIXED)
    expected = token_loss(model(*given), given[0])
    is_step_of(model, pipe, expected, pipe.step(*given, target=given[0], loss_fn=token_loss))
    assert "features" in kept(pipe)
    if kind is Mean:
        given = cropped((*MIXED[:1], *MIXED[:0:-1]))
        torch.testing.assert_close(pipe(*given), model(*given))


@pytest.mark.parametrize("grids", [ALIKE, MIXED])
def test_a_call_that_is_not_cut_returns_lists(grids):
    class Returns(Cropped):
        def forward(self, ids, patches, grid):
            made = self.features(patches, grid)
            return self.head(self.layers[0](torch.cat(made["found"]))), made["found"]

    model, pipe = made(Returns, chunks=1)
    given = cropped(grids)
    for _ in range(2):
        torch.testing.assert_close(pipe(*given), model(*given))


class Small(nn.Module):
    """A submodule with little of the model."""

    def __init__(self):
        super().__init__()
        self.small, self.layers = Branches(), nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x):
        return self.layers(self.small(x))


class Branches(nn.Module):
    """Which layers a method uses depends on values."""

    def __init__(self):
        super().__init__()
        self.choices = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def chosen(self, x):
        for number, layer in enumerate(self.choices):
            if x.amax() > number * 10:
                x = layer(x)
        return x

    def forward(self, x):
        return self.choices[0](torch.tanh(self.chosen(x)))


def test_a_submodule_with_little_of_the_model_is_kept_whole():
    torch.manual_seed(0)
    model = Small()
    pipe, x = fxpipe.compile(copy.deepcopy(model), devices=2, chunks=2), torch.randn(4, WIDTH)
    torch.testing.assert_close(pipe(x), model(x))
    assert kept(pipe).keys() == {"small"}


@pytest.mark.filterwarnings("ignore::fxpipe.errors.MixedSamplesWarning")
def test_what_a_method_did_not_use_before_is_an_error_or_captured():
    """A method that runs with other submodules than it is given says so, and leaves the model as it was."""
    torch.manual_seed(0)
    model = Branches()
    pipe, x = fxpipe.compile(copy.deepcopy(model), devices=1, chunks=1), torch.rand(4, WIDTH)
    torch.testing.assert_close(pipe(x), model(x))
    assert kept(pipe) == {"chosen": ("choices.0.weight", "choices.0.bias")}
    with pytest.raises(RuntimeError, match=r"a method that is kept whole uses choices\.1, which it did not use"):
        pipe(x + 20)
    torch.testing.assert_close(pipe(x), model(x))
    torch.testing.assert_close(pipe.model(x + 20), model(x + 20))


class ByMode(Branches):
    """A method uses other submodules in evaluation."""

    def chosen(self, x):
        count = int(torch.tanh(x @ self.choices[0].weight).isfinite().all().item())
        return count * self.choices[1 if self.training else 2](x)


def test_a_method_has_what_it_uses_in_any_kind_of_call():
    torch.manual_seed(0)
    model, x = ByMode(), torch.rand(4, WIDTH)
    pipe = fxpipe.compile(copy.deepcopy(model), devices=1, chunks=2)
    for mode in (True, False, True, False):
        model.train(mode), pipe.train(mode)
        with torch.set_grad_enabled(mode):
            torch.testing.assert_close(pipe(x), model(x))
    numbers = [int(name.split(".")[1]) for name in kept(pipe)["chosen"]]
    assert numbers in ([0, 1, 1], [0, 1, 1, 2, 2])


class Decorated(Branches):
    """Decorators around a method run with it; random numbers are drawn in it."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout()

    @torch.autocast("cpu", enabled=False)
    def chosen(self, x):
        return self.drop(super().chosen(x))


@pytest.mark.filterwarnings("ignore::fxpipe.errors.MixedSamplesWarning")
def test_methods_with_decorators_and_random_numbers():
    torch.manual_seed(0)
    model, x = Decorated(), torch.rand(4, WIDTH)
    found = []
    for chunks, devices in ((2, 1), (2, 2)):
        pipe = fxpipe.compile(copy.deepcopy(model), devices=devices, chunks=chunks, checkpoint="always")
        torch.manual_seed(3)
        loss = pipe.step(x, loss_fn=lambda out: out.square().mean())
        assert kept(pipe).keys() == {"chosen"}
        found.append((loss, *(p.grad for p in pipe.parameters() if p.grad is not None)))
    torch.testing.assert_close(*found)


@pytest.mark.slow
def test_warnings_name_methods_once():
    model, pipe = made(Reader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps(model, pipe)
        steps(model, pipe, GRIDS[::-1])
    said = [str(one.message).partition(" is kept whole")[0] for one in caught if "kept whole" in str(one.message)]
    assert sorted(said) == ["Reader.features", "Reader.positions"]
