"""What mixes the samples of a batch is found, with the user's line; what only looks like it passes."""

import re
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.batching.batch_facts import multiple, number
from fxpipe.capture import capture
from fxpipe.errors import CaptureError
from fxpipe.torch_internals.pytrees import tree_map
from tests.helpers.marks import mostly_slow


class Body(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("ema", torch.zeros(4))
        self.weight = nn.Parameter(torch.ones(1, 1))

    def forward(self, x):
        return self.body(self, x)


def layered(body):
    """The same, with a layer behind, so that it is no epilogue."""

    def behind(self, x):
        return tree_map(lambda y: layer(self, y) if isinstance(y, torch.Tensor) else y, body(self, x))

    def layer(self, y):
        return (y.to(self.weight.dtype).unsqueeze(-1) @ self.weight).squeeze(-1)

    return behind


def outputs(body, x=None, **options):
    graph = capture(Body(body), (torch.randn(6, 5, 4) if x is None else x,), **options)
    return [(str(graph.types[o.value]), o.batch_dim, o.reduce) for o in graph.outputs]


def test_dimensions():
    assert [multiple(size) for size in ("b", "5*b", "b*t", "b - 1", "2*(b//2)", 3)] == [
        1,
        5,
        number("t"),
        None,
        None,
        None,
    ]


def update(self, x):
    self.ema.mul_(0.9).add_(x.detach().mean((0, 1)))
    return self.norm(x.flatten(0, 1)).unflatten(0, (x.shape[0], 5))


def chunked(self, x):
    left, right = torch.cat([x, x + 1]).chunk(2)
    return left * right


def windowed(self, x):
    mask = x.new_zeros((5, 4))
    mask[1:3] = 1
    return x.masked_fill(mask != 0, 0.0) * torch.ones_like(x[0])


PASSES = {
    "transposed": (lambda self, x: x.transpose(0, 1), [("f32[5, b, 4]", 1, None)]),
    "flattened": (lambda self, x: x.flatten(0, 1), [("f32[5*b, 4]", 0, None)]),
    "flattened, joined along another dimension": (
        lambda self, x: torch.cat([x.flatten(0, 1), torch.hstack([x.flatten(0, 1), x.view(-1, 4)])], dim=-1),
        [("f32[5*b, 12]", 0, None)],
    ),
    "flattened, concatenated along another dimension": (
        lambda self, x: torch.concatenate([x.flatten(0, 1), x.view(-1, 4)], -1),
        [("f32[5*b, 8]", 0, None)],
    ),
    "a convolution for each sample": (
        lambda self, x: F.conv1d(x.view(1, -1, 4), x.view(-1, 1, 4)[..., :3], padding=1, groups=x.shape[0] * 5),
        [("f32[1, 5*b, 4]", 1, None)],
    ),
    "rows of each sample, strided": (
        lambda self, x: x.as_strided((x.shape[0], 2, 4, 4), (20, 4, 4, 1)),
        [("f32[b, 2, 4, 4]", 0, None)],
    ),
    "numbers of rows, divided": (
        lambda self, x: x.view(-1, 4)[torch.div(torch.arange(x.shape[0] * 5), 5, rounding_mode="floor") * 5 + 2],
        [("f32[5*b, 4]", 0, None)],
    ),
    "attention of each sample, sequence first": (
        lambda self, x: attention(x.transpose(0, 1).transpose(0, 1)),
        [("f32[b, 5, 4]", 0, None)],
    ),
    "raveled": (lambda self, x: x.ravel().exp().reshape_as(x), [("f32[b, 5, 4]", 0, None)]),
    "flattened, stacked": (
        lambda self, x: torch.stack([x.flatten(0, 1), x.view(-1, 4)], 1),
        [("f32[5*b, 2, 4]", 0, None)],
    ),
    "flattened and back": (lambda self, x: x.reshape(-1, 4).exp().view(x.shape[0], 20), [("f32[b, 20]", 0, None)]),
    "other dimensions": (lambda self, x: x.softmax(-1).cumsum(1).flip(1).sort(-1)[0], [("f32[b, 5, 4]", 0, None)]),
    "softmax of a plane": (lambda self, x: F.softmax(x.flatten(1)), [("f32[b, 20]", 0, None)]),
    "attention": (lambda self, x: F.softmax(x @ x.transpose(1, 2), dim=-1) @ x, [("f32[b, 5, 4]", 0, None)]),
    "sequence first": (lambda self, x: x.transpose(0, 1).cumsum(0)[-1], [("f32[b, 4]", 0, None)]),
    "masks": (lambda self, x: x.masked_fill(torch.ones(5, 4).tril().bool(), 0.0), [("f32[b, 5, 4]", 0, None)]),
    "a mask of the samples' type": (windowed, [("f32[b, 5, 4]", 0, None)]),
    "own statistics": (update, [("f32[b, 5, 4]", 0, None)]),
    "views of two": (chunked, [("f32[b, 5, 4]", 0, None)]),
    "rows by number": (lambda self, x: x[torch.arange(x.shape[0]), x[:, :, 0].argmax(1)], [("f32[b, 4]", 0, None)]),
    "independent": (lambda self, x: (x, torch.arange(5)), [("f32[b, 5, 4]", 0, None), ("i64[5]", None, "same")]),
    "sizes": (lambda self, x: (x, 2 * x.shape[0]), [("f32[b, 5, 4]", 0, None), ("int", None, "sum")]),
    "einsum": (lambda self, x: torch.einsum("bij,jk->bki", x, torch.ones(4, 3)), [("f32[b, 3, 5]", 0, None)]),
    "expanded": (lambda self, x: torch.ones(1, 1, 4).expand(x.shape[0], 5, -1) + x, [("f32[b, 5, 4]", 0, None)]),
    "zeros for a token": (
        lambda self, x: torch.cat([torch.zeros(1, 1, 4).expand(x.shape[0], -1, -1), x], 1),
        [("f32[b, 6, 4]", 0, None)],
    ),
    "layer norm": (lambda self, x: F.layer_norm(x, (4,)), [("f32[b, 5, 4]", 0, None)]),
    "conv": (lambda self, x: F.conv1d(x, torch.ones(7, 5, 3)), [("f32[b, 7, 2]", 0, None)]),
    "sequence first, flattened": (
        lambda self, x: x.transpose(0, 1).reshape(-1, 4).exp().view(5, x.shape[0], 4),
        [("f32[5, b, 4]", 1, None)],
    ),
    "vmap": (lambda self, x: torch.vmap(lambda s: s / s.norm())(x), [("f32[b, 5, 4]", 0, None)]),
    "vmap in a vmap": (
        lambda self, x: torch.vmap(torch.vmap(lambda v: v - v.mean(0)), in_dims=1, out_dims=1)(x.transpose(0, 1)),
        [("f32[5, b, 4]", 1, None)],
    ),
    "vmap beside the batch": (
        lambda self, x: torch.vmap(lambda s, t: s * t + s.exp(), in_dims=(1, 1), out_dims=1)(x, x + 1),
        [("f32[b, 5, 4]", 0, None)],
    ),
    "mean of a vmap": (lambda self, x: torch.vmap(lambda s: s.max() * 2)(x).mean(), [("f32[]", None, "mean")]),
    "squeezed": (lambda self, x: x.unsqueeze(1).squeeze().unsqueeze(-1).squeeze(), [("f32[b, 5, 4]", 0, None)]),
    "lstm": (lambda self, x: recurrent(x, True), [("f32[b, 5, 3]", 0, None)]),
    "lstm, sequence first": (lambda self, x: recurrent(x.transpose(0, 1), False), [("f32[5, b, 3]", 1, None)]),
}


def recurrent(x, batch_first):
    state, weights = x.new_zeros(1, x.shape[0 if batch_first else 1], 3), (torch.ones(12, 4), torch.ones(12, 3))
    return torch.lstm(x, (state, state), weights, False, 1, 0.0, True, False, batch_first)[0]


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("name", PASSES)
def test_passes(name):
    body, expected = PASSES[name]
    assert outputs(body) == expected


def halves(self, x):
    a, b = x.flatten(0, 1).chunk(2)
    return a + b


def tail(self, x):
    return x[1:] - x[:-1]


def summed(self, x):
    total = x.new_zeros(5, 4)
    total += x.sum(0)
    return x - total


def row(x):
    return x.mean(1).t()[None]


def attention(x):
    return F.scaled_dot_product_attention(x, x, x)


def heads(x):
    weight = torch.ones(12, 4), torch.ones(4, 4)
    arguments = 4, 2, weight[0], None, None, None, False, 0.0, weight[1], None
    return F.multi_head_attention_forward(x, x, x, *arguments, need_weights=False)[0]


MIXES = {
    "centred": (lambda self, x: x - x.mean(0), "pools the batch into f32"),
    "summed up": (summed, "pools the batch into f32"),
    "first sample": (lambda self, x: x - x[0], "pools the batch into f32"),
    "normed": (lambda self, x: x / x.norm(), "pools the batch into f32"),
    "softmax": (lambda self, x: x.softmax(0), "softmax runs along the batch, dimension 0 of f32"),
    "softmax without a dimension": (lambda self, x: F.softmax(x), "softmax runs along the batch, dimension 0 of f32"),
    "softmin without a dimension": (lambda self, x: F.softmin(x), "softmin runs along the batch, dimension 0 of f32"),
    "a quarter turn": (lambda self, x: torch.rot90(x), "rot90 runs along the batch, dimension 0 of f32"),
    "function softmax": (
        lambda self, x: F.softmax(x.transpose(0, 1), dim=1),
        "softmax runs along the batch, dimension 1",
    ),
    "cumsum": (lambda self, x: x.cumsum(dim=0), "cumsum runs along the batch"),
    "sort": (lambda self, x: torch.sort(x, 0)[0], "sort runs along the batch"),
    "flip": (lambda self, x: x.flip(1, 0), "flip runs along the batch"),
    "roll": (lambda self, x: x.roll(1, 0), "roll runs along the batch"),
    "flat roll": (lambda self, x: x.roll(1), "roll runs along the batch"),
    "normalize": (lambda self, x: F.normalize(x, dim=0), "normalize runs along the batch"),
    "similarity": (lambda self, x: x.flatten(1) @ x.flatten(1).t(), "every sample meets every other"),
    "shuffled": (lambda self, x: x[torch.randperm(x.shape[0])], "changes the order of the batch"),
    "divided": (lambda self, x: x / x.shape[0], "computes with the batch size"),
    "multiplied": (lambda self, x: x.multiply(x.shape[0]), "computes with the batch size"),
    "vmap over another": (lambda self, x: torch.vmap(lambda s: s - s.mean(0), 1, 1)(x), "takes the whole batch, f32"),
    "vmap and the batch": (lambda self, x: torch.vmap(lambda s: (s - x).sum((0, 1)))(x), "takes the whole batch"),
    "vmap beside the batch, pairs": (
        lambda self, x: torch.vmap(lambda s, t: s * t, 2, 2)(x[:, None], x[None]),
        "every sample meets every other",
    ),
    "vmap beside the batch, mean": (
        lambda self, x: torch.vmap(lambda s, m: s - m, (1, 0), 1)(x, x.mean(0)),
        "pools the batch",
    ),
    "vmap and vmap": (
        lambda self, x: torch.vmap(lambda s: torch.vmap(lambda t: (s - t).norm())(x).sum())(x),
        "in two vmaps over the batch",
    ),
    "vmap and a mean": (lambda self, x: torch.vmap(lambda s: s - x.mean((0, 1)))(x), "pools the batch into f32"),
    "vmap of a mean": (lambda self, x: torch.vmap(lambda s: s * 2)(x.mean(0)) + x, "pools the batch into f32"),
    "vmap and a size": (lambda self, x: torch.vmap(lambda s: s / x.shape[0])(x), "computes with the batch size"),
    "lstm along the batch": (lambda self, x: recurrent(x, False), "the batch, for its steps"),
    "attention over samples": (
        lambda self, x: attention(x.mean(1)[None]),
        "scaled_dot_product_attention runs over dim",
    ),
    "attention of torch's own": (
        lambda self, x: heads(x.mean(1)),
        "multi_head_attention_forward runs over dimension 0",
    ),
    "convolution over samples": (lambda self, x: F.conv1d(row(x), x.new_ones(4, 4, 3), padding=1), "conv1d runs over"),
    "pool over samples": (lambda self, x: F.avg_pool1d(row(x), 3, 1, 1), "avg_pool1d runs over dimension 2"),
    "norm over samples": (
        lambda self, x: F.layer_norm(x.mean(1).t(), (x.shape[0],)),
        "layer_norm runs over dimension 1",
    ),
    "norm of groups over samples": (lambda self, x: F.group_norm(row(x), 2), "group_norm runs over dimension 2"),
    "transform over samples": (lambda self, x: torch.fft.fft(x, dim=0).real, "fft_fft runs along the batch"),
    "transform over all": (lambda self, x: torch.fft.fftn(x).real, "fft_fftn runs along the batch"),
    "triangle": (lambda self, x: x.mean(1).triu(), "triu runs over dimension 0"),
    "renormed": (lambda self, x: torch.renorm(x, 2, 1, 1.0), "renorm runs over dimension 0"),
    "strided": (lambda self, x: x.as_strided((x.shape[0], 4), (4, 1)), "as_strided runs over dimension 0"),
    "terms": (lambda self, x: torch.einsum("bti,cti->ci", x, x), "sums over samples in 'bti,cti->ci'"),
    "taken apart": (lambda self, x: x.flatten().view(4, -1).sum(0), "takes samples apart"),
    "two orders": (
        lambda self, x: (torch.cat([x, x]) * x.repeat_interleave(2, 0)).view(2, -1, 5, 4),
        "different orders",
    ),
    "the next sample": (lambda self, x: x[(torch.arange(x.shape[0]) + 1) % x.shape[0]], "by their number"),
    "covariance": (lambda self, x: x @ (x.flatten(0, 1).t() @ x.flatten(0, 1)), "pools the batch into f32"),
}
REFUSED = {
    "part": (tail, "takes a part of the batch"),
    "numbered": (lambda self, x: (x, torch.arange(x.shape[0])), "numbers the samples"),
    "numbers": (lambda self, x: x + torch.arange(x.shape[0])[:, None, None], "numbers the samples"),
    "sequence first": (lambda self, x: x.transpose(0, 1).flatten(0, 1), "other things before the batch"),
    "both views": (lambda self, x: torch.cat([x, x]), "other things before the batch"),
    "both views, concatenated": (lambda self, x: torch.concatenate([x, x]), "other things before the batch"),
    "both views, stacked rows": (lambda self, x: torch.vstack([x, x]), "other things before the batch"),
    "sequence first, joined": (
        lambda self, x: torch.cat([x.transpose(0, 1).flatten(0, 1)] * 2, 1),
        "other things before the batch",
    ),
    "halves": (halves, "cuts f32.* along the batch|takes a part of the batch"),
    "one number": (lambda self, x: x.max(), "is one value over the batch.*reduce="),
    "one more": (lambda self, x: (x, x.shape[0] + 1), "a number that depends on the batch size"),
    "padded": (lambda self, x: F.pad(x, (0, 0, 0, 0, 1, 0)), "takes a part of the batch"),
}


def behind_norm(body):
    """The same of what batch norm returns, which also writes its statistics."""
    return lambda self, x: body(self, self.norm(x.flatten(0, 1)).unflatten(0, (x.shape[0], 5)))


BEHIND = {"": lambda body: body, "behind batch norm": behind_norm}


MIXING = list(product(MIXES, BEHIND))  # by default one of both in turn


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize(("name", "behind"), mostly_slow(MIXING, [*MIXING[::4], *MIXING[3::4]].__contains__))
def test_mixes(name, behind):
    body, message = MIXES[name]
    (mixed,) = capture(Body(layered(BEHIND[behind](body))), (torch.randn(6, 5, 4, requires_grad=True),)).mixed
    assert mixed.origin.file.endswith("test_batch_dimension.py")
    assert re.search(message, mixed.what)
    assert not mixed.meant


@pytest.mark.parametrize("behind", mostly_slow(BEHIND, "".__eq__))
@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name, behind):
    body, message = REFUSED[name]
    body = layered(BEHIND[behind](body))
    with pytest.raises(CaptureError, match=r"(?s)test_batch_dimension.py:\d+\n    .*" + f"({message})"):
        outputs(body, torch.randn(6, 5, 4, requires_grad=True))


def test_a_squeeze_takes_the_same_from_a_micro_batch_of_one():
    def squeeze(self, x):
        return torch.squeeze(x.mean((1, 2), keepdim=True)) + x[:, 0, 0]

    pipe = fxpipe.compile(Body(squeeze), devices=2, chunks=3)
    x = torch.randn(3, 5, 4)
    torch.testing.assert_close(pipe(x), squeeze(None, x))
    with pytest.raises(
        CaptureError, match=r"(?s)test_batch_dimension.py:\d+\n.*takes away a batch of one; name the dimension"
    ):
        pipe(x[:1])


def test_what_mixes_matters_only_where_it_comes_out():
    assert mixed(lambda self, x: ((x @ x.flatten(0, 1).t()).sum(), x.exp())[1]) == []


def pairs(self, x):
    h = x.mean(1)
    return {"pairs": h @ h.t(), "centred": x - x.mean(0), "same": h}


def mixed(body, **options):
    graph = capture(Body(body), (torch.randn(6, 5, 4, requires_grad=True),), **options)
    return [(one.outputs, one.meant) for one in graph.mixed]


def test_each_micro_batch_is_a_batch_of_its_own():
    x = torch.randn(6, 5, 4, requires_grad=True)
    body = layered(pairs)
    assert [(dim, reduce) for _, dim, reduce in outputs(body, x)] == [(0, None)] * 3
    assert mixed(body) == [(("squeeze",), False), (("squeeze_1",), False)]
    assert mixed(body, reduce={"squeeze": "cat"}) == [(("squeeze",), True), (("squeeze_1",), False)]
    assert mixed(body, reduce="cat") == [(("squeeze",), True), (("squeeze_1",), True)]
    assert mixed(body, reduce="mean") == mixed(body)  # that is about numbers


def test_without_a_layer_behind_it_is_an_epilogue():
    graph = capture(Body(pairs), (torch.randn(6, 5, 4, requires_grad=True),))
    assert graph.mixed == ()
    assert [str(graph.types[output.value]) for output in graph.returned] == ["f32[b, 4]", "f32[b, b]", "f32[b, 5, 4]"]
    assert [output.value for output in graph.epilogue.outputs] == ["matmul", "sub"]
    taken = {str(output): str(graph.types[output.value]) for output in graph.outputs if output.value in graph.taken}
    assert sorted(taken.values()) == ["f32[5, 4]", "f32[b, 4]", "f32[b, 5, 4]"]  # of the samples, and their mean


def through_a_view(self, x):
    total = torch.zeros(4, 1)
    row = total.view(1, 4)
    total += x.sum((0, 1)).unsqueeze(1)
    return row


def test_what_is_written_through_another_name():
    with pytest.raises(CaptureError, match="one value over the batch"):
        outputs(through_a_view)


def test_reduced():
    def body(self, x):
        return {"loss": x.mean(), "count": (x > 0).sum()}

    assert outputs(body, reduce={"mean": "mean", "sum_1": "sum"}) == [("f32[]", None, "mean"), ("i64[]", None, "sum")]
