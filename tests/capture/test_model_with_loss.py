"""A step captures the model with its loss: which losses, when it captures again, whose tensors, which errors."""

import copy
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxpipe.capture import NO_TARGET, CallCapture, StepCapture
from fxpipe.errors import CaptureError, InputError
from fxpipe.ir.graph.evaluate_graph import evaluate


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(8, 3)

    def forward(self, x, scale=1.0):
        return self.head(self.body(x)) * scale


X, Y = torch.randn(6, 4), torch.tensor([0, 2, 1, -100, 1, 0])


class Steps:
    """A stepper whose graphs are evaluated on the whole batch at once, and the plain model beside it."""

    def __init__(self, model, **options):
        self.model, self.plain, self.graphs = model, copy.deepcopy(model), []
        self.step_capture = StepCapture(model, **options)

    def run(self, graph, inputs):
        self.graphs.append(graph)
        assert all(p.untyped_storage().nbytes() for p in self.model.parameters())
        tensors = self.step_capture.tensors
        items = [item for item in graph.inputs if item.path]
        given = dict(zip([item.name for item in items], inputs, strict=True))

        def states(of):
            return {s.name: tensors[s.path] for s in of.states if s.kind != "constant"}

        if graph.totals is not None:
            known = evaluate(graph.totals, given, states(graph.totals))
            given |= {output.value: known[output.value] for output in graph.totals.outputs}
        values = evaluate(graph, given, states(graph))
        return tuple(values[output.value] for output in graph.outputs)

    def __call__(self, *args, target=NO_TARGET, loss_fn=None, outputs=False, **kwargs):
        torch.manual_seed(0)
        output = self.plain(*args, **kwargs)
        expected = loss_of(output, target, loss_fn)
        torch.manual_seed(0)
        loss, got = self.step_capture.step(args, kwargs, target, loss_fn, outputs, self.run)
        torch.testing.assert_close(loss, expected)
        if outputs:
            torch.testing.assert_close(got, output)
        else:
            assert got is None
        for name, buffer in self.plain.named_buffers():
            torch.testing.assert_close(self.model.get_buffer(name), buffer)
        return loss

    @property
    def kinds(self):
        return len({id(graph.ops) for graph in self.graphs})


def loss_of(output, target, loss_fn):
    if loss_fn is None:
        return (
            output if isinstance(output, torch.Tensor) else output["loss"] if isinstance(output, dict) else output.loss
        )
    return loss_fn(output) if target is NO_TARGET else loss_fn(output, target)


def test_new_functions_of_the_same_code_are_of_one_kind():
    steps = Steps(Net())
    for k in range(5):
        weight = torch.rand(3)
        steps(X, target=Y, loss_fn=lambda o, t: F.cross_entropy(o, t))
        steps(X, target=Y, loss_fn=lambda o, t, w=weight: F.cross_entropy(o, t, weight=w))
        steps(X, target=Y, loss_fn=partial(F.cross_entropy, label_smoothing=0.1))
        steps(X, target=Y, loss_fn=nn.CrossEntropyLoss(weight=weight))
        steps(X, target=Y, loss_fn=lambda o, t: nn.functional.cross_entropy(o, t, weight=weight))  # noqa: B023
        steps(X, target=Y, loss_fn=F.cross_entropy)
        if k == 0:
            first = steps.kinds
    assert first == steps.kinds == 6


def test_other_kinds_of_calls_are_seen():
    steps = Steps(Net())
    steps(X, target=Y, loss_fn=F.cross_entropy)
    steps(X, target=Y, loss_fn=F.cross_entropy, outputs=True)
    steps(X, target=F.one_hot(Y.clamp(min=0), 3).float(), loss_fn=F.cross_entropy)
    steps(X, target=Y.clamp(min=0), loss_fn=nn.CrossEntropyLoss(ignore_index=1))
    steps(X, target=None, loss_fn=lambda o, t: o.mean() if t is None else t.mean())
    steps(X, loss_fn=lambda o: o.square().mean())
    assert steps.kinds == 6
    for module in (steps.model, steps.plain):
        module.eval()
    steps(X, target=Y, loss_fn=F.cross_entropy)
    assert steps.kinds == 7
    assert not steps.graphs[-1].training
    steps(X, 0.5, target=Y, loss_fn=F.cross_entropy)
    steps(X, 0.25, target=Y, loss_fn=F.cross_entropy)
    steps(X, 0.125, target=Y, loss_fn=F.cross_entropy)
    assert steps.kinds <= 9


def test_numbers_in_a_target_vary():
    steps = Steps(Net())
    for alpha in (0.1, 0.2, 0.3, 0.4):
        steps(X, target={"y": Y, "alpha": alpha}, loss_fn=lambda o, t: t["alpha"] * F.cross_entropy(o, t["y"]))
    assert steps.kinds <= 2
    assert [item.path for item in steps.graphs[-1].inputs] == ["x", "target['y']", "target['alpha']", ""]


def test_graph():
    graph = StepCapture(Net()).capture((X,), {}, Y, lambda o, t: F.cross_entropy(o, t), outputs=True)
    assert [(i.path, i.batch_dim) for i in graph.inputs] == [("x", 0), ("target", 0), ("", None)]
    assert graph.call[1].keys() == {"target"}
    assert graph.arguments == ("x",)
    assert graph.totals.inputs == graph.inputs[:2]
    assert [(o.value == graph.loss, o.reduce) for o in graph.outputs] == [(True, "sum"), (False, None)]
    loss = graph.ops[-1]
    assert loss.name == graph.loss
    assert (
        loss.origin.code
        == "graph = StepCapture(Net()).capture((X,), {}, Y, lambda o, t: F.cross_entropy(o, t), outputs=True)"
    )
    assert loss.origin.module == ""
    # Where an op is and whose parameters it uses is the same as without a loss.
    forward = CallCapture(Net()).capture((X,), {})
    assert [op.origin for op in forward.ops] == [op.origin for op in graph.ops[: len(forward.ops)]]
    assert [state.path for state in forward.states] == [state.path for state in graph.states]


def test_nothing_changes():
    model = Net()
    before = copy.deepcopy(model.state_dict())
    loss_fn = nn.CrossEntropyLoss(weight=torch.rand(3))
    random = torch.get_rng_state()
    StepCapture(model).capture((X,), {}, Y, loss_fn)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    assert loss_fn.weight.untyped_storage().nbytes()


# Losses with tensors of their own -------------------------------------------------------------------------------------


class Margin(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("scale", torch.tensor(2.0))
        self.calls = 0

    def forward(self, output, target):
        self.calls += 1
        return (output - self.centres[target]).square().mean() * self.scale


def test_parameters_of_a_loss():
    steps, loss_fn, y = Steps(Net()), Margin(), Y.clamp(min=0)
    plain = copy.deepcopy(loss_fn)
    for _ in range(3):
        steps(X, target=y, loss_fn=loss_fn)
    assert loss_fn.calls == 6  # the test calls it beside
    paths = {state.path for state in steps.graphs[-1].states}
    assert {"loss_fn.centres", "loss_fn.scale", "head.weight"} <= paths
    assert steps.step_capture.tensors["loss_fn.centres"] is loss_fn.centres
    assert {op.origin.module for op in steps.graphs[-1].ops} >= {"loss_fn", "head", "body.0"}
    version = steps.step_capture.version
    steps(X, target=y, loss_fn=plain)
    assert steps.step_capture.tensors["loss_fn.centres"] is plain.centres
    assert steps.step_capture.version != version
    assert steps.kinds <= 2


criterion = Margin()


def with_global(output, target):
    return criterion(output, target)


def test_where_a_loss_finds_its_modules():
    y, own = Y.clamp(min=0), Margin()

    class Trainer:
        def __init__(self):
            self.factor = 2.0

        def loss(self, output, target):
            return self.factor * own(output, target)

    for loss_fn, path in (
        (lambda o, t: own(o, t), "loss_fn.own.centres"),
        (lambda o, t, own=own: own(o, t), "loss_fn.own.centres"),
        (with_global, "loss_fn.criterion.centres"),
        (partial(own), "loss_fn.func.centres"),
        (own.forward, "loss_fn.self.centres"),
        (Trainer().loss, "loss_fn.func.own.centres"),
    ):
        steps = Steps(Net())
        steps(X, target=y, loss_fn=loss_fn)
        assert path in {state.path for state in steps.graphs[-1].states if state.kind == "parameter"}


def test_what_a_loss_notes_is_noted_once():
    class Trainer:
        def __init__(self):
            self.calls, self.last = 0, None

        def __call__(self, output, target):
            loss = F.cross_entropy(output, target)
            self.calls += 1
            self.last = loss.detach()
            return loss

    steps, trainer = Steps(Net()), Trainer()
    steps(X, target=Y, loss_fn=Trainer())
    for k in range(4):
        torch.manual_seed(0)
        loss, _ = steps.step_capture.step((X,), {}, Y, trainer if k % 2 else trainer.__call__, False, steps.run)
        assert trainer.calls == k + 1
        torch.testing.assert_close(trainer.last, loss.detach())


class WithLoss(Net):
    def __init__(self):
        super().__init__()
        self.loss_fn = Margin()

    def compute(self, output, target):
        return self.loss_fn(output, target) + 0.1 * self.head.weight.square().sum()


def test_what_is_in_the_model_keeps_its_path():
    model, y = WithLoss(), Y.clamp(min=0)
    for loss_fn in (model.loss_fn, model.compute, lambda o, t: model.loss_fn(o, t)):
        graph = StepCapture(model).capture((X,), {}, y, loss_fn)
        assert "loss_fn.centres" in [state.path for state in graph.states]
    graph = StepCapture(model).capture((X,), {}, y, Margin())
    assert "loss_fn_.centres" in [state.path for state in graph.states]


# Models that return their loss ----------------------------------------------------------------------------------------


@dataclass
class ModelOutput(OrderedDict):
    """As libraries of transformers have it: a dataclass that is a dict of what is not None."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self):
        for name in ("loss", "logits"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


@dataclass
class Plain:
    loss: torch.Tensor | None
    logits: torch.Tensor


class Pair(NamedTuple):
    logits: torch.Tensor
    error: torch.Tensor


class Labelled(Net):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x, labels=None):
        logits = super().forward(x)
        return self.make(None if labels is None else F.cross_entropy(logits, labels), logits)


MAKES = {
    "model output": lambda loss, logits: ModelOutput(loss=loss, logits=logits),
    "dataclass": Plain,
    "dict": lambda loss, logits: {"loss": loss, "logits": logits},
    "tensor": lambda loss, logits: loss,
    "one each": lambda loss, logits: logits.square().mean(1),
}


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("outputs", [False, True])
def test_a_model_returns_its_own_loss(make, outputs):
    steps = Steps(Labelled(MAKES[make]))
    for _ in range(2):
        torch.manual_seed(0)
        loss, got = steps.step_capture.step((X,), {"labels": Y}, NO_TARGET, None, outputs, steps.run)
        torch.manual_seed(0)
        expected = steps.plain(X, labels=Y)
        torch.testing.assert_close(loss, loss_of(expected, NO_TARGET, None))
        assert type(got) is (type(expected) if outputs else type(None))
    assert steps.kinds == 1
    assert [item.path for item in steps.graphs[-1].inputs if item.path] == ["x", "labels"]


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "target", "loss_fn", "message"),
    [
        (Net(), NO_TARGET, None, r"Net returns f32\[b, 3\], which is neither one number .*; pass loss_fn="),
        (
            Labelled(Plain),
            NO_TARGET,
            None,
            r"^Labelled returns Plain\(loss=None, logits=f32\[b, 3\]\), and no `.loss`; pass loss_fn=",
        ),
        (
            Labelled(lambda a, b: (b, b.mean())),
            NO_TARGET,
            None,
            r"^Labelled returns \(f32\[b, 3\], f32\[\]\), and no `.loss`; write loss_fn=lambda out: out\[1\]$",
        ),
        (
            Labelled(lambda a, b: {"x": b, "losses": [b.detach().sum(), b.mean()]}),
            NO_TARGET,
            None,
            r"^Labelled returns \{'x': f32\[b, 3\], 'losses': \[f32\[\], f32\[\]\]\}, and no `.loss`; write "
            r"loss_fn=lambda out: out\['losses'\]\[1\]$",
        ),
        (
            Labelled(lambda a, b: Pair(b, b.sum())),
            NO_TARGET,
            None,
            r"^Labelled returns Pair\(logits=f32\[b, 3\], error=f32\[\]\), and .*; write loss_fn=lambda out: out\.e",
        ),
        (Net(), Y, None, "there is a target, but no loss_fn"),
        (Net(), Y, "mse", "loss_fn is 'mse'; pass a function"),
        (
            Net(),
            Y,
            lambda o, t: (F.cross_entropy(o, t), o),
            r"^loss_fn returns \(f32\[\], f32\[b, 3\]\), no tensor; let it return the loss alone, write \[0\] of that$",
        ),
        (Net(), Y, lambda o, t: 1.0, "^loss_fn returns a number of Python's, no tensor; let it return the tensor, "),
        (Net(), Y, lambda o, t: o.mean(0), r"loss_fn returns f32\[3\], which is neither.*take the mean"),
        (Net(), Y, lambda o, t: o.detach().mean(), "needs no gradient"),
        (Net(), Y, lambda o, t: t, "needs no gradient"),
        (Net(), Y[:4], F.cross_entropy, r"(?s)no common batch size.*target: 4 in dimension 0 of \(4,\)"),
        (
            Net(),
            {"a": [Y[:4]]},
            F.cross_entropy,
            r"(?s)target\['a'\]\[0\]: 4.*batch_dim=\{\"target\['a'\]\[0\]\": None\}",
        ),
    ],
)
def test_says_what_to_write(model, target, loss_fn, message):
    with pytest.raises((CaptureError, InputError), match=message):
        StepCapture(model).capture((X,), {}, target, loss_fn)


def test_the_target_is_cut_as_the_user_says():
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, target):
            return self.fc(target)

    x, y = torch.randn(5, 6, 4), torch.randint(0, 3, (5, 6))

    def loss(o, t):
        return F.cross_entropy(o.flatten(0, 1), t["y"].flatten(), t["w"])

    dims = {"target": 1, "loss_target['y']": 1, "loss_target['w']": None}
    graph = StepCapture(Sequence(), dims).capture((x,), {}, {"y": y, "w": torch.rand(3)}, loss)
    assert [(i.path, i.batch_dim) for i in graph.inputs if i.path] == list(dims.items())
    with pytest.raises(InputError, match="batch_dim names 'labels', which is no input; the inputs are target, loss_t"):
        StepCapture(Sequence(), {"labels": 1}).capture((x,), {}, {"y": y}, loss)


def test_outputs_follow_the_same_rules():
    class Two(Net):
        def forward(self, x, mask):
            h, count = super().forward(x), mask.sum()
            return {"h": h, "mean": h.mean(), "share": (h.mean(1) * mask).sum() / count, "count": count}

    graph = StepCapture(Two()).capture((X, torch.ones(6)), {}, NO_TARGET, lambda o: o["h"].sum(), outputs=True)
    assert [(o.batch_dim, o.reduce) for o in graph.outputs] == [
        (None, "sum"),
        (0, None),
        (None, "mean"),
        (None, "sum"),
        (None, "same"),
    ]
    assert [o.value for o in graph.totals.outputs] == [graph.outputs[-1].value]
