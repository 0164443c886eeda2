"""The kinds of operators: for each a function that makes an operator from those it reads, with the dimensions of its
output and their roles (table 1 of the SOAP paper, extended to all kinds), its weights and its work.

    kind                 sample  attribute               parameter
    conv1d, conv2d       sample  length; height, width   channel
    pool1d, pool2d       sample  channel, length; ...
    linear, lstm, embedding, attention, projected_softmax
                         sample  length, where it has one  channel
    batch_norm           sample  height, width           channel
    layer_norm, softmax, loss     sample  length
    elementwise, concat  sample  all others
    samplewise           sample
    matmul, scaled_dot_product    sample  all that are not summed over

The dimension that products are summed over can be cut in linear and projected_softmax (input channels), matmul (the
inner dimension) and embedding (the vocabulary).

    x = image("image", 64, 3, 224, 224)
    y = convolution("conv1", x, 64, window=11, stride=4, padding=2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from fxpipe.ir.operators.operators import Dimension, Operator, Role

Slides = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # window, stride, padding
Window = int | Sequence[int]  # one for all dimensions that a window slides over, or one for each


def image(name: str, sample: int, channel: int, height: int, width: int) -> Operator:
    """A batch of images that is fed in; free to compute."""
    output = (Dimension("sample", sample, "S"), Dimension("channel", channel), *_area(height, width))
    return Operator(name, "input", (), output)


def tokens(name: str, sample: int, length: int | None = None) -> Operator:
    """Token numbers that are fed in: one for each sample, or sequences of `length`."""
    lengths = () if length is None else (Dimension("length", length, "A"),)
    return Operator(name, "input", (), (Dimension("sample", sample, "S"), *lengths))


def features(name: str, sample: int, channel: int) -> Operator:
    """A batch of vectors that is fed in."""
    return Operator(name, "input", (), (Dimension("sample", sample, "S"), Dimension("channel", channel)))


def convolution(
    name: str, x: Operator, channel: int, window: Window, stride: Window = 1, padding: Window = 0, shared: str = ""
) -> Operator:
    """A convolution with bias over (sample, channel, length) or (sample, channel, height, width)."""
    (w, s, p), area = _slide(x, window, stride, padding)
    inside = x.sizes[1] * prod(w)
    output = (x.output[0], Dimension("channel", channel, "P"), *area)
    weights = (inside + 1) * channel
    return Operator(name, f"conv{len(area)}d", (x.name,), output, 2.0 * inside, weights, shared, w, s, p)


def pooling(name: str, x: Operator, window: Window, stride: Window | None = None, padding: Window = 0) -> Operator:
    """Pooling over the dimensions that a convolution slides over; `stride` is the window if not given."""
    (w, s, p), area = _slide(x, window, window if stride is None else stride, padding)
    output = (x.output[0], replace(x.output[1], role="A"), *area)
    return Operator(name, f"pool{len(area)}d", (x.name,), output, float(prod(w)), window=w, stride=s, padding=p)


def batch_norm(name: str, x: Operator) -> Operator:
    """Normalisation of each channel (dimension 1). Statistics, a few bytes, are exchanged at no cost."""
    output = _with_roles(x, {1: "P"})
    return Operator(name, "batch_norm", (x.name,), output, 4.0, 2 * x.sizes[1])


def layer_norm(name: str, x: Operator) -> Operator:
    """Normalisation over the last dimension, which is not cut."""
    last = len(x.output) - 1
    return Operator(name, "layer_norm", (x.name,), _with_roles(x, {last: ""}), 8.0, 2 * x.sizes[last])


def linear(name: str, x: Operator, channel: int, shared: str = "") -> Operator:
    """A fully-connected layer with bias over the last dimension."""
    inside = x.sizes[-1]
    output = (*_with_roles(x, {})[:-1], Dimension("channel", channel, "P"))
    return Operator(name, "linear", (x.name,), output, 2.0 * inside, (inside + 1) * channel, shared, summed=inside)


def embedding(name: str, x: Operator, vocabulary: int, channel: int, shared: str = "") -> Operator:
    """A row of a table of weights for each token number."""
    output = (*_with_roles(x, {}), Dimension("channel", channel, "P"))
    return Operator(name, "embedding", (x.name,), output, 1.0, vocabulary * channel, shared, summed=vocabulary)


def lstm(name: str, x: Operator, state: Operator | None, channel: int, shared: str = "") -> Operator:
    """One step of an LSTM layer: `x` is the step's input, `state` the layer's state after the step before (None:
    zeros)."""
    inside = x.sizes[-1] + channel
    output = (x.output[0], Dimension("channel", channel, "P"))
    inputs = (x.name,) if state is None else (x.name, state.name)
    return Operator(name, "lstm", inputs, output, 8.0 * inside, 4 * (inside + 2) * channel, shared)


def attention(name: str, x: Operator, states: tuple[Operator, ...], shared: str = "") -> Operator:
    """A decoder's step that attends to all states of an encoder (Luong's "general" attention): a matrix product with
    the decoder's state, scores, the weighted sum of the encoder's states, and a linear layer over sum and state."""
    channel = x.sizes[-1]
    output = (x.output[0], Dimension("channel", channel, "P"))
    work = 6.0 * channel + 4.0 * len(states)
    return Operator(name, "attention", (x.name, *(s.name for s in states)), output, work, 3 * channel**2, shared)


def projected_softmax(name: str, x: Operator, classes: int, shared: str = "") -> Operator:
    """A linear layer onto `classes` with its softmax: one operator, as in the SOAP paper."""
    inside = x.sizes[-1]
    output = (*_with_roles(x, {})[:-1], Dimension("channel", classes, "P"))
    weights = (inside + 1) * classes
    return Operator(name, "projected_softmax", (x.name,), output, 2.0 * inside + 3, weights, shared, summed=inside)


def softmax(name: str, x: Operator) -> Operator:
    """Softmax over the last dimension, which is not cut."""
    return Operator(name, "softmax", (x.name,), _with_roles(x, {len(x.output) - 1: ""}), 3.0)


def loss(name: str, x: Operator, target: Operator | None = None) -> Operator:
    """A loss for each sample (and position), reduced over the last dimension of `x`."""
    inputs = (x.name,) if target is None else (x.name, target.name)
    return Operator(name, "loss", inputs, _with_roles(x, {})[:-1], 4.0 * x.sizes[-1])


def elementwise(name: str, *xs: Operator, work: float = 1.0) -> Operator:
    """An activation, a sum, a product, dropout: operands of the same sizes, or of size 1 where they are repeated."""
    widest = max(xs, key=lambda x: x.elements)
    return Operator(name, "elementwise", tuple(x.name for x in xs), _with_roles(widest, {}), work)


def concat(name: str, xs: tuple[Operator, ...], axis: int = 1) -> Operator:
    """Tensors concatenated in dimension `axis`."""
    output = list(_with_roles(xs[0], {}))
    output[axis] = replace(output[axis], size=sum(x.sizes[axis] for x in xs))
    return Operator(name, "concat", tuple(x.name for x in xs), tuple(output), axis=axis)


def flatten(name: str, x: Operator) -> Operator:
    """All dimensions but the first as one."""
    output = (x.output[0], Dimension("channel", prod(x.sizes[1:]), "A"))
    return Operator(name, "flatten", (x.name,), output)


def matmul(name: str, a: Operator, b: Operator) -> Operator:
    """(..., rows, inside) times (..., inside, columns), neither of them a weight."""
    rows, columns = replace(a.output[-2], role="A"), replace(b.output[-1], role="A")
    output, inside = (*_with_roles(a, {})[:-2], rows, columns), a.sizes[-1]
    return Operator(name, "matmul", (a.name, b.name), output, 2.0 * inside, summed=inside)


def scaled_dot_product(name: str, query: Operator, key: Operator, value: Operator, heads: int) -> Operator:
    """Attention of (sample, length, channel) tensors, all heads at once. Channels are cut between heads."""
    *others, channel = _with_roles(query, {})
    output = (*others, replace(channel, step=channel.size // heads))
    return Operator(name, "scaled_dot_product", (query.name, key.name, value.name), output, 4.0 * key.sizes[1])


def samplewise(name: str, xs: tuple[Operator, ...], output: tuple[Dimension, ...], work: float = 0.0) -> Operator:
    """Anything that is computed for each sample by itself and is cut only between samples: another shape, a slice."""
    first, *others = output
    dimensions = (replace(first, role="S"), *(replace(other, role="") for other in others))
    return Operator(name, "samplewise", tuple(x.name for x in xs), dimensions, work)


def _with_roles(x: Operator, roles: dict[int, Role]) -> tuple[Dimension, ...]:
    """The dimensions of `x` for an operator without weights: the first is the sample, the others attributes."""
    return tuple(replace(d, role=roles.get(at, "A" if at else "S")) for at, d in enumerate(x.output))


def _area(*sizes: int) -> tuple[Dimension, ...]:
    names = ("length",) if len(sizes) == 1 else ("height", "width")
    return tuple(Dimension(name, size, "A") for name, size in zip(names, sizes, strict=True))


def _slide(x: Operator, window: Window, stride: Window, padding: Window) -> tuple[Slides, tuple[Dimension, ...]]:
    """Window, stride and padding as one number for each dimension slid over, and the dimensions that come out."""
    sizes = x.sizes[2:]
    w, s, p = ((one,) * len(sizes) if isinstance(one, int) else tuple(one) for one in (window, stride, padding))
    each = zip(sizes, w, s, p, strict=True)
    return (w, s, p), _area(*((size + 2 * before - wide) // step + 1 for size, wide, step, before in each))
