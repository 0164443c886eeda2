"""Losses of uneven micro-batches, put together as the graph says, are the loss of the batch, with its gradients."""

import copy
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxpipe
from fxpipe.capture import NO_TARGET, StepCapture, capture
from fxpipe.errors import CaptureError
from fxpipe.ir.graph.evaluate_graph import evaluate, with_totals
from tests.helpers.layer_behind import LayerBehind
from tests.helpers.marks import mostly_slow

ROWS = 7
CHUNKS = 3  # of 3, 2 and 2 samples
torch.manual_seed(0)
WEIGHT = torch.rand(5, dtype=torch.float64) + 0.5


class Net(nn.Module):
    """[b, 3, 4] to [b, 5, 3]: classes in the middle, as cross_entropy likes it."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        return self.fc(x).transpose(1, 2)


class Steps:
    """A stepper that evaluates graphs on micro-batches, and takes gradients as an engine would."""

    def __init__(self, model, chunks=CHUNKS, **options):
        self.model, self.chunks, self.graphs = model, chunks, []
        self.step_capture = StepCapture(
            model, sizes=lambda b: [len(c) for c in torch.arange(b).tensor_split(chunks)], **options
        )

    def run(self, graph, inputs):
        self.graphs.append(graph)
        items = [item for item in graph.inputs if item.path]
        whole = dict(zip([item.name for item in items], inputs, strict=True))
        tensors = self.step_capture.tensors
        every = (*graph.states, *(graph.totals.states if graph.totals else ()))
        states = {s.name: tensors[s.path] if s.kind != "constant" else s.value for s in every}
        known = with_totals(graph, whole, states)
        dims = {item.name: item.batch_dim for item in graph.inputs}
        rows = max([known[name].shape[dim] for name, dim in dims.items() if dim is not None], default=1)
        parts = {
            name: [value] * self.chunks if dims[name] is None else value.tensor_split(self.chunks, dims[name])
            for name, value in known.items()
        }
        shares = [len(part) / rows for part in torch.arange(rows).tensor_split(self.chunks)]
        found = []
        (loss,) = [output for output in graph.outputs if output.value == graph.loss]
        for i, share in enumerate(shares):
            values = evaluate(graph, {name: part[i] for name, part in parts.items()}, states)
            root = torch.ones_like(values[loss.value])
            if loss.batch_dim is None and loss.reduce != "sum":
                root = root * share
            values[loss.value].backward(root)
            found.append(values)
        return tuple(join(output, [values[output.value] for values in found], shares) for output in graph.outputs)

    def __call__(self, *args, target=NO_TARGET, loss_fn=None, outputs=False, **kwargs):
        return self.step_capture.step(args, kwargs, target, loss_fn, outputs, self.run)


def join(output, values, shares):
    values = [value.detach() if isinstance(value, torch.Tensor) else value for value in values]
    if output.batch_dim is not None:
        return torch.cat(values, output.batch_dim)
    if output.reduce == "mean":
        return sum(value * share for value, share in zip(values, shares, strict=True))
    return sum(values) if output.reduce == "sum" else values[0]


def exact(model, args, target=NO_TARGET, loss_fn=None, **options):
    """Check the loss and all gradients of a step against the plain model's; gives how the loss is put together."""
    plain, plain_fn = copy.deepcopy((model, loss_fn))
    steps = Steps(model, **options)
    output = plain(*args)
    expected = output if plain_fn is None else plain_fn(output) if target is NO_TARGET else plain_fn(output, target)
    expected.backward(torch.ones_like(expected))
    got, _ = steps(*args, target=target, loss_fn=loss_fn)
    close(got, expected.detach())
    modules = [(model, plain)] + ([(loss_fn, plain_fn)] if isinstance(loss_fn, nn.Module) else [])
    for one, other in modules:
        for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                close(p.grad, q.grad)
    graph = steps.graphs[-1]
    (loss,) = [o for o in graph.outputs if o.value == graph.loss]
    return loss.reduce if loss.batch_dim is None else "samples"


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


def labels(share=0.4, index=-100, shape=(ROWS, 3)):
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, 5, shape, generator=generator)
    return y.masked_fill(torch.rand(shape, generator=generator) < share, index)


def data(*shape):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def masked(o, t):
    loss = F.cross_entropy(o, t.clamp(min=0), reduction="none")
    mask = t != -100
    return (loss * mask).sum() / mask.sum().clamp(min=1)


def masked_by_writing(o, t):
    counts = torch.ones_like(t, dtype=torch.bool)
    counts[:, 0] = False
    counts &= t != -100
    loss = F.cross_entropy(o, t.clamp(min=0), reduction="none")
    return (loss * counts).sum() / counts.sum().clamp(min=1)


def masked_before(o, t):
    mask = (t != -100).double()
    return (F.cross_entropy(o, t.clamp(min=0), reduction="none") * (mask / mask.sum())).sum()


def masked_maximum(o, t):
    mask = t != -100
    return (F.cross_entropy(o, t.clamp(min=0), reduction="none") * mask).sum() / max(mask.sum(), 1)


def accumulated(o, t):
    total = torch.zeros((), dtype=torch.float64)
    for k in range(3):
        total += F.mse_loss(o[..., k], t[..., k], reduction="sum")
    return total


def shifted(o, t):
    """As language models do it."""
    t = F.pad(t, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(o.transpose(1, 2).reshape(-1, 5).float().double(), t.reshape(-1))


def coefficient(o, t):
    return ((o - t) ** 2).sum() / ((t - t.mean()) ** 2).sum()


def normal(o, t):
    return -torch.distributions.Normal(o, 1.0, validate_args=False).log_prob(t).mean()


def into_a_mean(o, t):
    total = o.square().mean()
    total += (o - t).abs().sum()
    total -= t.mean()
    return total


class Penalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.centre = nn.Parameter(torch.ones(5, 1, dtype=torch.float64))

    def forward(self, o, t):
        return (o - t - self.centre).abs().sum() + self.centre.square().sum()


Y, SOFT, SIGNS, Z = labels(), data(ROWS, 5, 3).softmax(1), torch.tensor([1, -1, 1, 1, -1, 1, -1]), data(ROWS, 5, 3)
LOSSES = {
    # name: (target, loss, how it is put together)
    "mse": (Z, nn.MSELoss(), "mean"),
    "mse, sum": (Z, nn.MSELoss(reduction="sum"), "sum"),
    "mse, old way": (Z, lambda o, t: F.mse_loss(o, t, size_average=False), "sum"),
    "mse, none": (Z, lambda o, t: F.mse_loss(o, t, reduction="none"), "samples"),
    "mse, weighted": (Z, lambda o, t: F.mse_loss(o, t, weight=t + 0.5), "sum"),
    "l1": (Z, F.l1_loss, "mean"),
    "smooth l1": (Z, nn.SmoothL1Loss(beta=0.1), "mean"),
    "huber": (Z, nn.HuberLoss(), "mean"),
    "bce": (Z, lambda o, t: F.binary_cross_entropy(o.sigmoid(), t, weight=t + 1), "mean"),
    "bce of logits": (Z, nn.BCEWithLogitsLoss(pos_weight=data(5, 3)), "mean"),
    "kl, batchmean": (SOFT, lambda o, t: F.kl_div(o.log_softmax(1), t, reduction="batchmean"), "mean"),
    "kl, mean": (SOFT, lambda o, t: F.kl_div(o.log_softmax(1), t), "mean"),
    "cross entropy, sum": (Y, nn.CrossEntropyLoss(reduction="sum"), "sum"),
    "cross entropy, none": (Y, nn.CrossEntropyLoss(reduction="none"), "samples"),
    "cross entropy": (Y, F.cross_entropy, "sum"),
    "cross entropy, other index": (labels(index=7), nn.CrossEntropyLoss(ignore_index=7), "sum"),
    "cross entropy, weights": (Y, nn.CrossEntropyLoss(weight=WEIGHT), "sum"),
    "cross entropy, smooth": (Y, nn.CrossEntropyLoss(label_smoothing=0.1), "sum"),
    "cross entropy, both": (Y, nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), "sum"),
    "cross entropy, constant weights": (Y, lambda o, t: F.cross_entropy(o, t, WEIGHT), "sum"),
    "cross entropy, none count": (labels(2.0), F.cross_entropy, "sum"),
    "cross entropy, none of the first": (torch.cat([labels(2.0)[:3], labels(0.2)[3:]]), F.cross_entropy, "sum"),
    "cross entropy, probabilities": (SOFT, nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), "mean"),
    "cross entropy of own labels": (Z, lambda o, t: F.cross_entropy(o + t, o.argmax(1)), "mean"),
    "nll": (Y, lambda o, t: F.nll_loss(o.log_softmax(1), t, weight=WEIGHT), "sum"),
    "shifted labels": (Y, shifted, "sum"),
    "masked": (Y, masked, "sum"),
    "masked, none count": (labels(2.0), masked, "sum"),
    "masked by writing": (Y, masked_by_writing, "sum"),
    "masked, before": (Y, masked_before, "sum"),
    "masked, maximum": (Y, masked_maximum, "sum"),
    "cosine": (SIGNS, lambda o, t: F.cosine_embedding_loss(o[..., 0], o[..., 1], t), "mean"),
    "triplet": (Z, lambda o, t: F.triplet_margin_loss(o[..., 0], o[..., 1], t[..., 0]), "mean"),
    "triplet, own distance": (
        Z,
        lambda o, t: nn.TripletMarginWithDistanceLoss()(o[..., 0], o[..., 1], t[..., 0]),
        "mean",
    ),
    "poisson": (Z, nn.PoissonNLLLoss(), "mean"),
    "hinge": (SIGNS, lambda o, t: F.hinge_embedding_loss(o[:, 0, 0], t), "mean"),
    "soft margin": (SIGNS, lambda o, t: F.soft_margin_loss(o[:, 0, 0], t), "mean"),
    "ranking": (SIGNS, lambda o, t: F.margin_ranking_loss(o[:, 0, 0], o[:, 1, 1], t), "mean"),
    "many margins": (labels(0, shape=(ROWS,)), lambda o, t: F.multi_margin_loss(o[..., 0], t), "mean"),
    "many labels": ((Z > 0.5).double(), lambda o, t: nn.MultiLabelSoftMarginLoss()(o[..., 0], t[..., 0]), "mean"),
    "normal": (Z, normal, "mean"),
    "by hand": (Z, lambda o, t: (o - t).square().sum((1, 2)).mean(), "mean"),
    "over the batch": (Z, lambda o, t: (o - t).abs().sum() / o.shape[0], "mean"),
    "over all": (Z, lambda o, t: ((o - t) ** 2).sum() / o.numel(), "mean"),
    "rate": (Z, lambda o, t: (1 / len(o)) * (o - t).square().sum(), "mean"),
    "before the sum": (Z, lambda o, t: ((o - t).abs() / t.shape[0]).sum(), "mean"),
    "back to a sum": (Z, lambda o, t: F.mse_loss(o, t) * o.size(0) * 3, "sum"),
    "two": (Z, lambda o, t: F.mse_loss(o, t) + 0.1 * F.l1_loss(o, t).to(torch.float64) - o.mean() / 2, "mean"),
    "stacked": (Z, lambda o, t: torch.stack([F.mse_loss(o, t), o.mean()]).mean(), "mean"),
    "python's sum": (Z, lambda o, t: sum([F.mse_loss(o, t), (o * t).sum() / len(t)]) / 2, "mean"),
    "accumulated": (Z, accumulated, "sum"),
    "classes first": (Z, lambda o, t: (o - t).square().mean(0).mean(0).sum().view(1), "mean"),
    "einsum": (Z, lambda o, t: torch.einsum("bck,bck->", o, t), "sum"),
    "matmul": (Z, lambda o, t: (o[..., 0].t() @ t[..., 0]).sum(), "sum"),
    "dot": (Z, lambda o, t: torch.dot(o.reshape(-1), t.reshape(-1)), "sum"),
    "target's own scale": (Z, coefficient, "sum"),
    "scaled by the target's mean": (Z, lambda o, t: ((o - t).abs() / t.abs().mean()).mean(), "mean"),
    "sum and mean": (Z, lambda o, t: (o - t).abs().sum() + 0.1 * o.square().mean(), "sum"),
    "sum minus mean": (Z, lambda o, t: o.square().mean() - (o - t).abs().sum() - 0.5, "sum"),
    "sum and penalty": (Z, Penalised(), "sum"),
    "labels and mean": (Y, lambda o, t: F.cross_entropy(o, t) + F.l1_loss(o, -o) + F.nll_loss(o, t), "sum"),
    "labels, mean and number": (Y, lambda o, t: 1.0 + sum([F.cross_entropy(o, t), o.mean(), 0.5]), "sum"),
    "stack of sum and mean": (Z, lambda o, t: torch.stack([(o - t).abs().sum(), o.mean()]).mean(), "sum"),
    "stack by name": (Z, lambda o, t: torch.stack(tensors=[(o - t).abs().sum(), o.sum()]).sum(), "sum"),
    "linear of a mean": (Z, lambda o, t: F.linear(o.mean((0, 2)), WEIGHT, bias=torch.ones_like(WEIGHT[0])), "mean"),
    "into a mean": (Z, into_a_mean, "sum"),
    "weights like it": (
        Z,
        lambda o, t: ((o - t).square() * o.new_full((3,), 2.0) + t.new_empty(3).fill_(0.5)).mean(),
        "mean",
    ),
    "ones like its total": (Z, lambda o, t: (o - t).abs().sum() * torch.full_like(o.sum(), 2.0), "sum"),
    "zeros like a part": (Z, lambda o, t: (o - t).square().mean() + torch.zeros_like(o[0, 0, 0]), "mean"),
    "output alone": (NO_TARGET, lambda o: o.square().mean(), "mean"),
    "several": (
        {"a": Z, "b": [Y, 0.5, None]},
        lambda o, t: t["b"][1] * F.mse_loss(o, t["a"], reduction="sum") + F.cross_entropy(o, t["b"][0]),
        "sum",
    ),
}


@pytest.mark.parametrize("name", mostly_slow(LOSSES, [*LOSSES][::2].__contains__))
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.filterwarnings("ignore:size_average and reduce args")
def test_loss_and_gradients_are_those_of_the_batch(name):
    target, loss_fn, how = LOSSES[name]
    assert exact(Net().double(), (data(ROWS, 3, 4),), target, loss_fn) == how


PATTERNS = st.lists(st.lists(st.sampled_from([-100, 0, 1, 4]), min_size=3, max_size=3), min_size=1, max_size=7)
STEPS = {}


@settings(deadline=None, max_examples=60)
@given(PATTERNS, st.booleans(), st.sampled_from([0.0, 0.2]))
def test_any_labels_may_be_ignored(pattern, weighted, smoothing):
    if len(pattern) < CHUNKS:
        pattern = pattern * CHUNKS
    target, x = torch.tensor(pattern), data(len(pattern), 3, 4)
    key = weighted, smoothing
    if key not in STEPS:
        loss_fn = nn.CrossEntropyLoss(weight=WEIGHT if weighted else None, label_smoothing=smoothing)
        STEPS[key] = Steps(Net().double()), loss_fn
    steps, loss_fn = STEPS[key]
    plain = copy.deepcopy(steps.model)
    plain.zero_grad()
    steps.model.zero_grad()
    expected = loss_fn(plain(x), target)
    expected.backward()
    got, _ = steps(x, target=target, loss_fn=loss_fn)
    close(got, expected.detach())
    for p, q in zip(steps.model.parameters(), plain.parameters(), strict=True):
        close(p.grad, q.grad)


def test_a_sum_in_half_precision_is_taken_of_quotients():
    graph = StepCapture(Net().half()).capture((data(6, 3, 4).half(),), {}, labels(shape=(6, 3)), F.cross_entropy)
    assert [str(op.type) for op in graph.ops[-3:]] == ["f16[b, 3]", "f16[b, 3]", "f16[]"]


def written_with_outputs(o, t):
    weight = torch.ones_like(t)
    weight *= o.detach()
    return (o * t).sum() / weight.sum()


REFUSED = {
    "root": (lambda o, t: F.mse_loss(o, t).sqrt(), "no sum or mean over its samples"),
    "square": (lambda o, t: o.mean() * o.mean(), "it multiplies two values over the batch"),
    "quotient": (lambda o, t: (o * t).sum() / o.abs().sum(), "it divides by a value over the batch"),
    "quotient, written": (written_with_outputs, "it divides by a value over the batch"),
    "added to itself times its size": (
        lambda o, t: (o - t).abs().sum() * len(o) + o.mean(),
        "adds a sum over the samples to what is none",
    ),
    "most": (lambda o, t: (o - t).abs().max(), "no sum or mean"),
    "norm": (lambda o, t: (o - t).norm(), "no sum or mean"),
    "truncated": (lambda o, t: o.sum().long() * 1.0 + o.sum(), "no sum or mean"),
    "own weights": (lambda o, t: F.cross_entropy(o, (o.exp() > 1).long()[:, 0]), "labels that are ignored"),
    "broadcast": (lambda o, t: F.mse_loss(o[..., 0].mean(1, keepdim=True), t[:, 0, 0]), "broadcast"),
    "classes along the batch": (lambda o, t: F.cross_entropy(o[..., 0].t(), t[0, :, 0].long()), "along the batch"),
    "product of sums": (lambda o, t: torch.einsum("bi,cj->", o[..., 0], t[..., 0]), "no sum or mean"),
    "linear of a sum": (lambda o, t: F.linear(o.sum((0, 2)), WEIGHT, bias=WEIGHT[0]), "no sum or mean"),
    "a part": (lambda o, t: (o - t)[0].sum() + (o - t).sum(), "no sum or mean"),
    "squared size": (lambda o, t: (o - t).abs().sum() * len(o), "no sum or mean"),
    "contrast": (lambda o, t: F.cross_entropy(o[..., 0] @ t[..., 0].t(), torch.arange(len(o))), "of pairs of samples"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_refuses(name):
    loss_fn, why = REFUSED[name]
    loss_fn = LayerBehind(loss_fn)
    with pytest.raises(CaptureError, match=why) as caught:
        StepCapture(Net().double()).capture((data(ROWS, 3, 4),), {}, Z, loss_fn)
    message = str(caught.value)
    assert "test_batch_reductions.py:" in message
    assert "write reduce={'loss': 'mean'}" in message


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("backward", mostly_slow(["autograd", "code"], "code".__eq__))
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_without_a_layer_behind_it_is_that_of_the_batch(name, backward):
    loss_fn, _ = REFUSED[name]
    model = Net().double()
    twin, x = copy.deepcopy(model), data(ROWS, 3, 4)
    expected = loss_fn(twin(x), Z)
    expected.backward()
    with closing(fxpipe.compile(model, 2, CHUNKS, backward=backward)) as pipe:
        close(pipe.step(x, target=Z, loss_fn=loss_fn), expected.detach())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        close(p.grad, q.grad)


@pytest.mark.parametrize("reduce", mostly_slow(["mean", {"loss": "mean"}], lambda reduce: reduce != "mean"))
@pytest.mark.filterwarnings("ignore")
def test_what_the_user_says_wins(reduce):
    for loss_fn, _ in [*REFUSED.values(), (lambda o, t: (o - t).sum(), "")]:
        graph = StepCapture(Net().double(), reduce=reduce).capture((data(ROWS, 3, 4),), {}, Z, loss_fn)
        if graph.parts:  # it holds for what is no sum, and the rest adds up
            assert {how for _, how in graph.parts} == {"mean"}
            continue
        assert [(o.value, o.reduce) for o in graph.outputs] == [(graph.loss, "mean")]
        assert graph.totals is None


class Body(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x)


FORWARD = {
    "mean": lambda x: x.mean(),
    "sum": lambda x: x.square().sum(),
    "same": lambda x: (x, torch.ones(3).sum())[1],
}


@pytest.mark.parametrize("how", FORWARD)
def test_outputs_of_plain_calls(how):
    graph = capture(Body(FORWARD[how]), (data(ROWS, 4),))
    assert [o.reduce for o in graph.outputs] == [how]


def test_ones_are_as_many_as_samples():
    graph = capture(Body(lambda x: (x, torch.ones(x.shape[0]).sum())), (data(ROWS, 4),))
    assert [o.reduce for o in graph.outputs] == [None, "sum"]


@torch.library.custom_op("fxpipe_tests::counted", mutates_args=("count",))
def counted(count: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Writes one tensor, and returns another of the same type."""
    count.add_(1)
    return x.mean()


@counted.register_fake
def _(count: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(())


class CountsCalls(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return counted(self.count, x)


def test_what_writes_a_buffer_may_return_something_else():
    with pytest.raises(CaptureError, match="one value over the batch"):
        fxpipe.compile(CountsCalls(), devices=1, chunks=2, example_inputs=torch.ones(4, 3))
