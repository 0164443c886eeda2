"""Functions that forward calls and that cannot be traced, kept whole by themselves: such as the loss of a detector,
which matches boxes to those of each image."""

import functools
import math
import sys
from functools import partial
from itertools import permutations, product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.ir.graph.opaque_call import opaques
from tests.helpers.marks import mostly_slow

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* kept whole"),
    pytest.mark.filterwarnings("error::fxpipe.errors.MixedSamplesWarning"),
]
WIDTH, BOXES, KINDS = 8, 3, 4


class Settings:
    """What a loss is told that is no tensor."""

    def __init__(self, weight=2.0):
        self.weight = weight


def matched(cost):
    """For each column the row, so that the sum is smallest."""
    rows = range(len(cost))
    found = min(permutations(rows, len(cost[0])), key=lambda one: sum(cost[row][i] for i, row in enumerate(one)))
    return list(found)


def detection_loss(logits, boxes, labels, config, device=None, others=None):
    """The sum over images, its parts, and what was given for each layer."""
    parts = {"kind": 0, "box": 0}
    for own_logits, own_boxes, label in zip(logits, boxes, labels, strict=True):
        rows = matched(torch.cdist(own_boxes.detach(), label["boxes"], p=1).tolist())
        kinds = torch.full((BOXES,), KINDS - 1, device=device)
        kinds[rows] = label["kinds"]
        parts["kind"] = parts["kind"] + F.cross_entropy(own_logits, kinds, reduction="sum")
        parts["box"] = parts["box"] + F.l1_loss(own_boxes[rows], label["boxes"], reduction="sum")
    returned = None if others is None else [{"logits": one} for one in others]
    return parts["kind"] + config.weight * parts["box"], parts, returned


def tied_loss(logits, boxes, labels, config, layer, x):
    loss, _, _ = detection_loss(logits, boxes, labels, config)
    return loss + layer(x).square().sum()


def with_model(model, logits, boxes, labels):
    loss, _, _ = detection_loss(logits, boxes, labels, model.config)
    return loss + model.kinds.weight.square().sum() * len(logits)


def writing_loss(logits, boxes, labels, config):
    logits *= 2
    return detection_loss(logits, boxes, labels, config)[0]


def noisy_loss(logits, boxes, labels, config):
    return detection_loss(logits + torch.randn_like(logits) * 0, boxes, labels, config)[0] + torch.rand(()) * 0


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, BOXES * WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.kinds, self.boxes = nn.Linear(WIDTH, KINDS), nn.Linear(WIDTH, 4)
        self.config = Settings()

    def body(self, x):
        x, found = self.enter(x).unflatten(1, (BOXES, WIDTH)), []
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
            found.append(self.kinds(x))
        return x, found[-1], self.boxes(x).sigmoid(), found[:-1]


class ByProperty(Detector):
    @property
    def loss_function(self):
        return detection_loss

    def forward(self, x, labels):
        _, logits, boxes, others = self.body(x)
        loss, parts, others = self.loss_function(logits, boxes, labels, self.config, logits.device, others)
        return {"loss": loss, **parts, "logits": logits, "others": others}


class ByGlobal(Detector):
    def forward(self, x, labels):
        _, logits, boxes, _ = self.body(x)
        loss, parts, _ = detection_loss(logits, boxes, labels, config=self.config)
        return {"loss": loss, "parts": parts}


class Held:
    loss = staticmethod(detection_loss)


class ByClass(Detector):
    def forward(self, x, labels):
        _, logits, boxes, _ = self.body(x)
        return {"loss": Held.loss(logits, boxes, labels, self.config)[0]}


class ByPartial(Detector):
    def __init__(self):
        super().__init__()
        self.criterion = partial(detection_loss, config=self.config, device=torch.device("cpu"))

    def forward(self, x, labels):
        _, logits, boxes, others = self.body(x)
        loss, _, others = self.criterion(logits, boxes, labels, others=others)
        return {"loss": loss, "others": others}


class ByStaticMethod(Detector):
    @staticmethod
    def criterion(logits, boxes, labels, weight):
        return detection_loss(logits, boxes, labels, Settings(weight))[0]

    def forward(self, x, labels):
        _, logits, boxes, _ = self.body(x)
        return {"loss": self.criterion(logits, boxes, labels, 3.0)}


def twice(function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        found = function(*args, **kwargs)
        return found | {"loss": found["loss"] * 2}

    return run


class Decorated(Detector):
    """What the copy of forward must have: decorators, private names, super(), defaults, and the text of strings."""

    __factor = 0.5

    @twice
    def forward(self, x, labels=None, *, by: float = 3.0):
        text = """
            a
        """
        _, logits, boxes, _ = super().body(x)
        loss = detection_loss(logits, boxes, labels, self.config)[0]
        return {"loss": loss * self.__factor * by / len(text)}


def forward_with(factor):
    def forward(self, x, labels):
        _, logits, boxes, _ = self.body(x)
        return {"loss": detection_loss(logits, boxes, labels, self.config)[0] * self.__factor * factor}

    return forward


class MadeElsewhere(Detector):
    """Its forward is of no class, and has a closure."""

    forward = forward_with(3.0)

    def __init__(self):
        super().__init__()
        setattr(self, "__factor", 0.5)  # by this name


class InMethod(Detector):
    """The function is inside of a method, whose layer is traced."""

    def computed(self, logits, boxes, labels):
        return detection_loss(logits * self.kinds.bias.sum(), boxes, labels, self.config)

    def forward(self, x, labels):
        _, logits, boxes, _ = self.body(x)
        return {"loss": self.computed(logits, boxes, labels)[0]}


class Tied(Detector):
    """The function is given a layer that forward uses, too."""

    def forward(self, x, labels):
        x, logits, boxes, _ = self.body(x)
        return {"loss": tied_loss(logits, boxes, labels, self.config, self.kinds, x)}


class GivesItself(Detector):
    def forward(self, x, labels):
        _, logits, boxes, _ = self.body(x)
        return {"loss": with_model(self, logits, boxes, labels)}


class Two(Detector):
    """Two functions in one forward, one of them twice."""

    def forward(self, x, labels):
        _, logits, boxes, others = self.body(x)
        loss = detection_loss(logits, boxes, labels, self.config)[0] + noisy_loss(logits, boxes, labels, self.config)
        return {"loss": loss + detection_loss(others[0], boxes, labels, self.config)[0]}


def pruned_loss(logits, boxes, labels, config):
    """Traced, but for the number of rows: values decide it."""
    counts = (logits.amax(-1) > 0).long().flatten()
    return boxes.flatten(0, 1).repeat_interleave(counts, 0).square().sum()


class OfUnknownSize(Detector):
    def forward(self, x, labels):
        _, logits, boxes, _ = self.body(x)
        return {"loss": pruned_loss(logits, boxes, labels, self.config)}


class Regions(Detector):
    def forward(self, x, labels):
        _, logits, boxes, _ = self.body(x)
        with torch.no_grad():
            scale = detection_loss(logits, boxes, labels, self.config)[0]
        with torch.autocast("cpu", enabled=False):
            loss = detection_loss(logits, boxes, labels, self.config)[0]
        return {"loss": loss, "scale": scale}


FUNCTIONS = {
    ByProperty: {"loss_function": ()},
    ByGlobal: {"detection_loss": ()},
    ByClass: {"loss": ()},
    ByPartial: {"criterion": ()},
    ByStaticMethod: {"criterion": ()},
    Decorated: {"detection_loss": ()},
    MadeElsewhere: {"detection_loss": ()},
    InMethod: {"detection_loss": ()},
    Tied: {"tied_loss": ("kinds.weight", "kinds.bias")},
    GivesItself: {"with_model": ("kinds.weight",)},
    Two: {"detection_loss": (), "noisy_loss": ()},
    Regions: {"detection_loss": ()},
    OfUnknownSize: {"pruned_loss": ()},
}


def batch(samples=4):
    torch.manual_seed(3)
    counts = [i % BOXES + 1 for i in range(samples)]
    labels = [{"boxes": torch.rand(n, 4).double(), "kinds": torch.randint(0, KINDS - 1, (n,))} for n in counts]
    return torch.randn(samples, 6).double(), labels


def made(kind, **options):
    models = []
    for _ in range(2):  # no copy: it would have the closures of the first
        torch.manual_seed(1)
        models.append(kind().double())
    return models[0], fxpipe.compile(models[1], **{"devices": 2, "chunks": 2, "reduce": "sum"} | options)


def steps(model, pipe, samples=4):
    x, labels = batch(samples)
    model.zero_grad(), pipe.model.zero_grad()
    expected = model(x, labels)["loss"]
    expected.backward()
    loss = pipe.step(x, labels)
    torch.testing.assert_close(loss, expected.detach())
    own = dict(pipe.model.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(own[name].grad, parameter.grad)


def kept(pipe):
    """What is kept whole, with the tensors that it is given."""
    return {opaque.called: opaque.names for opaque in opaques(pipe.build.graph)}


WAYS = {
    "uncut": {"chunks": 1, "reduce": "auto"},
    "cut": {"chunks": 2},
    "code": {"chunks": 2, "backward": "code"},
    "recomputed": {"chunks": 4, "schedule": "1f1b", "checkpoint": "always"},
}


QUICK = [(ByPartial, "cut"), (Decorated, "uncut"), (ByProperty, "code"), (Tied, "cut")]


@pytest.mark.parametrize(("kind", "way"), mostly_slow(product(FUNCTIONS, WAYS), QUICK.__contains__))
def test_steps_are_those_of_the_model(kind, way):
    model, pipe = made(kind, **WAYS[way])
    for samples in (4, 6):
        steps(model, pipe, samples)
    assert kept(pipe) == FUNCTIONS[kind]
    assert len(pipe.stages) == 2
    assert all("self.layers[" in stage.source for stage in pipe.stages)


def test_the_code_calls_the_function_and_so_does_a_saved_package(tmp_path):
    for kind in (ByProperty, ByGlobal):
        model, pipe = made(kind)
        steps(model, pipe)
        name = next(iter(FUNCTIONS[kind]))
        assert f"self.{name}.vjp(" in pipe.stages[-1].source
        assert f"self.{name}" not in pipe.stages[0].source
        x, labels = batch()
        with torch.no_grad():
            expected = pipe(x, labels)
        pipe.save(tmp_path / name)
        torch.testing.assert_close(fxpipe.load(tmp_path / name, model)(x, labels)["loss"], expected["loss"])


def other_loss(logits, boxes, labels, config):
    return detection_loss(logits, boxes, labels, config)[0] + boxes.square().sum() + float(labels[0]["boxes"].sum()) * 0


class Replaceable(Detector):
    def __init__(self):
        super().__init__()
        self.criterion = noisy_loss

    def forward(self, x, labels):
        _, logits, boxes, _ = self.body(x)
        return {"loss": self.criterion(logits, boxes, labels, self.config)}


@pytest.mark.slow
def test_another_function_or_object_in_its_place_is_heeded():
    model, pipe = made(Replaceable)
    steps(model, pipe)
    for name, value in (("criterion", other_loss), ("config", Settings(5.0)), ("criterion", noisy_loss)):
        for one in (model, pipe.model):
            setattr(one, name, value)
        steps(model, pipe)
        assert kept(pipe) == {"criterion": ()}
    for one in (model, pipe.model):
        one.config.weight = 7.0
    steps(model, pipe)


def test_another_global_function_is_heeded(monkeypatch):
    model, pipe = made(ByGlobal)
    steps(model, pipe)
    own = detection_loss

    def changed(logits, boxes, labels, config):
        loss, parts, others = own(logits, boxes, labels, config)
        return loss * math.pi, parts, others

    monkeypatch.setattr(sys.modules[__name__], "detection_loss", changed)
    steps(model, pipe)


class Writes(Detector):
    def forward(self, x, labels):
        _, logits, boxes, _ = self.body(x)
        return {"loss": writing_loss(logits, boxes, labels, self.config)}


class Closes(Detector):
    """A function of forward's own, whose closure has the model."""

    def forward(self, x, labels):
        def criterion(logits, boxes):
            return detection_loss(logits + self.kinds.bias, boxes, labels, self.config)[0]

        _, logits, boxes, _ = self.body(x)
        return {"loss": criterion(logits, boxes)}


class HoldsModule(Detector):
    """A function whose closure has a layer."""

    def __init__(self):
        super().__init__()
        layer = self.kinds

        def criterion(logits, boxes, labels, config):
            return detection_loss(logits + layer.bias, boxes, labels, config)[0]

        self.criterion = criterion

    def forward(self, x, labels):
        _, logits, boxes, _ = self.body(x)
        return {"loss": self.criterion(logits, boxes, labels, self.config)}


class WritesInMethod(Writes):
    """The function cannot be kept whole, the method around it can."""

    def computed(self, logits, boxes, labels):
        return writing_loss(logits * self.kinds.weight.sum(), boxes, labels, self.config)

    def forward(self, x, labels):
        _, logits, boxes, _ = self.body(x)
        return {"loss": self.computed(logits, boxes, labels)}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Writes, {""}),
        pytest.param(Closes, {""}, marks=pytest.mark.slow),
        pytest.param(HoldsModule, {""}, marks=pytest.mark.slow),
        (WritesInMethod, {"computed"}),
    ],
)
def test_what_cannot_be_a_function_is_kept_in_what_is_around_it(kind, expected):
    model, pipe = made(kind)
    steps(model, pipe)
    assert kept(pipe).keys() == expected


def test_a_loss_of_the_batch_is_computed_once():
    model, pipe = made(ByProperty, reduce="auto")
    steps(model, pipe)
    (kept_whole,) = opaques(pipe.build.graph.epilogue)
    assert kept_whole.called.endswith("loss_function")


def test_the_model_itself_is_not_changed():
    model, pipe = made(ByProperty)
    steps(model, pipe)
    assert "forward" not in vars(pipe.model)
    assert vars(pipe.model).keys() == vars(model).keys()


def patches_of(size):
    """How many patches an image has, which its size in the batch decides."""
    best = 1
    for height, width in ((1, 2), (2, 2), (3, 1)):
        if min(height * size[0].item(), width * size[1].item()) > 2 * best:
            best = height * width
    return best


class Patches(nn.Module):
    """A method asks a function about each image."""

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def features(self, images, sizes):
        counts, found = [], self.embed(images)
        for size in sizes:  # a list in brackets is a function of its own before Python 3.12
            counts.append(patches_of(size))
        return torch.stack([one[:count].mean(0) for one, count in zip(found, counts, strict=True)])

    def forward(self, images, sizes):
        return self.head(torch.tanh(self.body(torch.tanh(self.features(images, sizes)))))


@pytest.mark.parametrize("chunks", mostly_slow([1, 2, 3], (2).__eq__))
def test_a_method_that_calls_it_for_each_sample_is_kept_in_its_place(chunks):
    torch.manual_seed(0)
    model, images = Patches().double(), torch.randn(6, 6, WIDTH).double()
    sizes = torch.tensor([[1, 2], [4, 1], [3, 3], [1, 1], [2, 5], [1, 4]])
    model(images, sizes).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    pipe = fxpipe.compile(model, 2, chunks)
    pipe.step(images, sizes, loss_fn=lambda y: y.square().mean())
    assert [one.method for one in opaques(pipe.build.graph)] == ["features"]
    torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=1e-9, atol=1e-12)
    assert len(pipe.stages) == 2
    pipe.close()
