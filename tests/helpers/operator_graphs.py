"""Small operator graphs and clusters for the tests of this room."""

from fxpipe.ir.cluster.cluster import Cluster, Device, Link
from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.planning.operators.models.operator_kinds import (
    attention,
    concat,
    convolution,
    elementwise,
    embedding,
    features,
    flatten,
    image,
    linear,
    lstm,
    pooling,
    projected_softmax,
    tokens,
)


def cluster(devices, flops=5e8, bandwidth=1e9, latency=1e-6, servers=1):
    """Equal devices on `servers` servers; between servers links are four times as slow."""
    found = tuple(Device(f"d{i}", 10**9, flops, 1e12, f"s{i * servers // devices}") for i in range(devices))
    names = sorted({device.server for device in found})
    links = tuple(Link((a, b), bandwidth if a == b else bandwidth / 4, latency) for a in names for b in names if a <= b)
    return Cluster(found, links)


def lenet(batch=64):
    x = image("image", batch, 1, 28, 28)
    conv1 = convolution("conv1", x, 6, 5, padding=2)
    pool1 = pooling("pool1", conv1, 2)
    conv2 = convolution("conv2", pool1, 16, 5)
    pool2 = pooling("pool2", conv2, 2)
    flat = flatten("flat", pool2)
    fc1 = linear("fc1", flat, 120)
    fc2 = linear("fc2", fc1, 84)
    return OperatorGraph("lenet", (x, conv1, pool1, conv2, pool2, flat, fc1, fc2, linear("fc3", fc2, 10)))


def branches(batch=8):
    """Convolutions side by side, with a stride that skips rows, concatenated and added."""
    x = image("image", batch, 3, 9, 9)
    stem = convolution("stem", x, 4, 3, padding=1)
    left = convolution("left", stem, 4, 1, stride=2)
    right = convolution("right", stem, 8, 3, stride=2, padding=1)
    both = concat("both", (left, right))
    skip = convolution("skip", stem, 12, 1, stride=2)
    return OperatorGraph("branches", (x, stem, left, right, both, skip, elementwise("sum", both, skip)))


def rnnlm(steps=2, layers=2, batch=16, width=32, vocabulary=64):
    words, operators, state = tokens("words", batch), [], [None] * layers
    for t in range(steps):
        x = embedding(f"embed_{t}", words, vocabulary, width, "embed")
        operators.append(x)
        for layer in range(layers):
            x = state[layer] = lstm(f"lstm{layer}_{t}", x, state[layer], width, f"lstm{layer}")
            operators.append(x)
        operators.append(projected_softmax(f"softmax_{t}", x, vocabulary, "softmax"))
    return OperatorGraph("rnnlm", (words, *operators))


def translation(steps=3, batch=16, width=32, vocabulary=64):
    words, operators, states, state = tokens("words", batch), [], [], None
    for t in range(2 * steps):
        side = "source" if t < steps else "target"
        x = embedding(f"embed_{t}", words, vocabulary, width, f"embed {side}")
        state = lstm(f"lstm_{t}", x, state, width, f"lstm {side}")
        operators += [x, state]
        if t < steps:
            states.append(state)
        else:
            seen = attention(f"attention_{t}", state, tuple(states), "attention")
            operators += [seen, projected_softmax(f"softmax_{t}", seen, vocabulary, "softmax")]
    return OperatorGraph("translation", (words, *operators))


def perceptron() -> OperatorGraph:
    """Two linear layers."""
    x = features("x", 8, 64)
    up = linear("up", x, 64)
    relu = elementwise("relu", up)
    return OperatorGraph("perceptron", (x, up, relu, linear("down", relu, 16)))
