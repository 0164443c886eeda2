"""The two halves of a backward against the whole."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.runtime.autograd import split_backward as split
from fxpipe.runtime.autograd.saved_tensors import Saved
from fxpipe.runtime.autograd.split_backward import input_gradient, weight_gradient
from fxpipe.runtime.autograd.unalias_gradients import unshare

Task = Callable[..., Any]  # takes, then parameters


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_(x.requires_grad) for x in tensors]


def outputs_of(task: Task, takes: Sequence[Tensor], parameters: Sequence[Tensor]) -> tuple[tuple[Any, ...], list[Any]]:
    torch.manual_seed(0)
    outputs = task(*takes, *parameters)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.manual_seed(1)
    return outputs, [torch.randn_like(y) if y is not None and y.requires_grad else None for y in outputs]


def whole(task: Task, takes: Sequence[Tensor], parameters: Sequence[Tensor]) -> tuple[list[Any], list[Any]]:
    """Gradients of takes and parameters by one backward."""
    takes, parameters = leaves(*takes), leaves(*parameters)
    outputs, grads = outputs_of(task, takes, parameters)
    pairs = [(y, grad) for y, grad in zip(outputs, grads, strict=True) if grad is not None]
    torch.autograd.backward(*zip(*pairs, strict=True))
    return [x.grad for x in takes], [x.grad for x in parameters]


def same(a: Tensor | None, b: Tensor | None) -> None:
    if a is None or b is None:
        assert a is b
    else:
        assert a.layout == b.layout
        torch.testing.assert_close(a.to_dense(), b.to_dense(), rtol=1e-12, atol=1e-12)


def check(
    task: Task, takes: Sequence[Tensor], parameters: Sequence[Tensor], times: int = 2, saved: Saved | None = None
) -> None:
    """The halves give what the whole gives, `times` micro-batches of it, with all first halves before the second."""
    expected_takes, expected = whole(task, takes, parameters)
    parameters = leaves(*parameters)
    left = []
    for _ in range(times):
        own = leaves(*takes)
        with saved or nullcontext():
            outputs, grads = outputs_of(task, own, parameters)
        found, weights = input_gradient(outputs, grads, own, saved)
        for a, b in zip(found, expected_takes, strict=True):
            same(a, b)
        assert all(x.grad is None for x in own)
        left.append(weights)
        del outputs
        gc.collect(0)
    assert all(x.grad is None for x in parameters)
    for weights in left:
        weight_gradient(weights)
    for x, b in zip(parameters, expected, strict=True):
        same(x.grad, None if b is None else b * times)
    del own, weights, left
    assert saved is None or saved.now == 0


def rand(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_(grad)


class Scale(torch.autograd.Function):
    """x * w, written in Python; it keeps count of its backwards."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        Scale.backwards += 1
        return grad * w, grad * x


class Pass(torch.autograd.Function):
    """Gives its second argument no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x + w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def lstm(x: Tensor, *weights: Tensor) -> Any:
    state = x.new_zeros(1, x.shape[1], 3)
    return torch.lstm(x, (state, state), weights, True, 1, 0.0, True, False, False)


def recurrent(x: Tensor, h: Tensor, w: Tensor, u: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    for step in x.unbind(0):
        h = torch.tanh(step @ w + h @ u + b)
    return h, h.sum()


def in_place(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    y = x * 1
    y[0] = w.sum(0)
    y[1:].mul_(v)
    y.add_(w[0]).relu_()
    return y


def in_place_on_weights(x: Tensor, w: Tensor) -> Tensor:
    y = w * 1
    y[0] = x[0]
    y[:, 1:].mul_(w[:, 1:])
    return y * x


def weight_norm(x: Tensor, v: Tensor, g: Tensor) -> Tensor:
    w = torch._weight_norm(v, g, 0)
    return F.linear(torch.tanh(F.linear(x, w)), w)


def batch_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mean, var = torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)
    return F.batch_norm(F.batch_norm(x, None, None, w, b, True), mean, var, w, None, False)


def hooked(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    y = x @ w
    y.register_hook(lambda grad: grad * 3)
    u = v * v
    u.register_hook(lambda grad: grad**3)  # not linear: it must see the sum
    z = y * u
    z.register_hook(lambda grad: grad + 1)
    return torch.sin(z) * u


def parallel(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w) + F.linear(torch.relu(x), w) * F.linear(x.sin(), w.t())


def tied(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(torch.sigmoid(F.linear(torch.tanh(F.linear(x, w, b)), w, b)), w * b, b * b)


def python_only(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes written in Python from one end to the other."""
    v = Scale.apply(Scale.apply(w, w), w)
    return Scale.apply(Scale.apply(x, v), v), Scale.apply(v, w)


CASES: dict[str, tuple[Task, tuple[Tensor, ...], tuple[Tensor, ...]]] = {
    "linear": (lambda x, w, b: torch.relu(F.linear(x, w, b)), (rand(2, 3),), (rand(4, 3), rand(4))),
    "linear of three dimensions": (lambda x, w, b: F.linear(x, w, b).sin(), (rand(2, 5, 3),), (rand(4, 3), rand(4))),
    "tied": (tied, (rand(2, 4),), (rand(4, 4), rand(4))),
    "parallel": (parallel, (rand(2, 4),), (rand(4, 4),)),
    "recurrent": (recurrent, (rand(3, 2, 4), rand(2, 4)), (rand(4, 4), rand(4, 4), rand(4))),
    "recurrent, one take": (recurrent, (rand(3, 2, 4, grad=False), rand(2, 4)), (rand(4, 4), rand(4, 4), rand(4))),
    "lstm": (lstm, (rand(5, 2, 3),), (rand(12, 3), rand(12, 3), rand(12), rand(12))),
    "convolution": (lambda x, w, b: F.conv2d(x, w, b).relu(), (rand(2, 3, 5, 5),), (rand(4, 3, 2, 2), rand(4))),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), (rand(3, 4),), (rand(4), rand(4))),
    "batch norm": (batch_norm, (rand(3, 4),), (rand(4), rand(4))),
    "chunk": (lambda x, w: torch.stack(F.linear(x, w).chunk(2, -1)[:1]), (rand(2, 3),), (rand(4, 3),)),
    "chunks of a weight": (
        lambda x, w: x * w.chunk(2)[0] + (x * w.chunk(2)[1]).sin() * w.unbind()[1],
        (rand(1, 3),),
        (rand(2, 3),),
    ),
    "weight norm": (weight_norm, (rand(2, 3),), (rand(3, 3), rand(3, 1))),
    "in place": (in_place, (rand(3, 4),), (rand(3, 4), rand(4))),
    "in place on what has weights only": (in_place_on_weights, (rand(3, 4),), (rand(3, 4),)),
    "views": (lambda x, w: (x.view(4, 2).t() + w.view(2, 4)).expand(3, 2, 4).sin(), (rand(2, 4),), (rand(8),)),
    "passed through": (lambda x, w: x.view(4) + w.view(4), (rand(2, 2),), (rand(1, 4),)),
    "a take given back": (lambda x, w: (x, x * w), (rand(3),), (rand(3),)),
    "a parameter given": (lambda x, w: (w, x * w), (rand(3),), (rand(3),)),
    "made of parameters alone": (lambda x, w: (w * w, x * w, (w * w).sin()), (rand(3),), (rand(3),)),
    "the same twice": (lambda x, w: (lambda y: (y, y))(x * w), (rand(3),), (rand(3),)),
    "an output of another": (lambda x, w: (lambda u, y: (u, y, (y * u).sin()))(w * w, x * w), (rand(3),), (rand(3),)),
    "no leaf": (lambda x, w: F.linear(x, w).relu(), (rand(2, 3, grad=False),), (rand(4, 3),)),
    "no parameter": (lambda x: x.sin(), (rand(3),), ()),
    "nothing needs a gradient": (lambda x, y, w: (x * 2, y * w), (rand(3, grad=False), rand(3)), (rand(3),)),
    "frozen": (lambda x, w, b: F.linear(x, w, b), (rand(2, 3),), (rand(4, 3, grad=False), rand(4))),
    "a take that is not used": (lambda x, y, w: x * w, (rand(3), rand(3)), (rand(3),)),
    "a parameter that is not used": (lambda x, w, v: x * w, (rand(3),), (rand(3), rand(3))),
    "integers": (lambda ids, x, w: F.embedding(ids, w) * x, (torch.tensor([1, 0, 1]), rand(3, 2)), (rand(4, 2),)),
    "sparse": (lambda i, x, w: F.embedding(i, w, sparse=True) * x, (torch.tensor([1, 1]), rand(2, 3)), (rand(4, 3),)),
    "sparse at the border": (
        lambda i, x, w: F.embedding_bag(i, w, per_sample_weights=x, mode="sum", sparse=True),
        (torch.tensor([[1, 1], [0, 2]]), rand(2, 2)),
        (rand(4, 3),),
    ),
    "complex": (
        lambda x, w: torch.view_as_real((x * w).exp() @ w),
        (rand(2, 2, dtype=torch.complex128),),
        (rand(2, 2, dtype=torch.complex128),),
    ),
    "dropout": (lambda x, w: F.dropout(F.linear(x, w), 0.5, True) @ w, (rand(4, 4),), (rand(4, 4),)),
    "attention": (
        lambda x, w, v: F.scaled_dot_product_attention(x @ w, x @ v, x @ (w * v)),
        (rand(1, 2, 3, 4),),
        (rand(4, 4), rand(4, 4)),
    ),
    "other precision": (lambda x, w: (x.float() @ w.float()).double() * w, (rand(3, 3),), (rand(3, 3),)),
    "hooks": (hooked, (rand(2, 3),), (rand(3, 3), rand(3))),
    "python function": (lambda x, w: Scale.apply(Scale.apply(x, w).sin(), w * w), (rand(3),), (rand(3),)),
    "python functions only": (python_only, (rand(3),), (rand(3),)),
    "python function without a gradient": (lambda x, w, v: Pass.apply(x * v, w), (rand(3),), (rand(3), rand(3))),
    "outputs without a gradient": (lambda x, w: (x.detach(), x * w, (x > 0)), (rand(3),), (rand(3),)),
    "broadcast": (lambda x, w, b: x * w + b, (rand(2, 3, 4),), (rand(3, 1), rand(4))),
    "a number": (lambda x, w: (x * w).sum() * w.sum(), (rand(3),), (rand(3),)),
}


@pytest.mark.parametrize("enough", [split.ENOUGH, 0], ids=["at the end", "at once"])
@pytest.mark.parametrize("case", CASES)
def test_equals_one_backward(case: str, enough: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "ENOUGH", enough)
    check(*CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_equals_one_backward_where_the_first_half_lets_go(case: str) -> None:
    check(*CASES[case], saved=Saved())


def test_outputs_without_incoming_gradient() -> None:
    x, w, v = rand(3), rand(3), rand(3)
    outputs = (x * w, x * v)
    (gx,), weights = input_gradient(outputs, (None, torch.ones_like(x)), (x,))
    weight_gradient(weights)
    assert torch.equal(gx, v)
    assert w.grad is None
    assert torch.equal(v.grad, x)


def test_no_gradient_at_all() -> None:
    x, w = rand(3), rand(3)
    found, weights = input_gradient((x * w,), (None,), (x,))
    weight_gradient(weights)
    assert (found, w.grad) == ((None,), None)


def test_an_output_of_many_that_nobody_uses() -> None:
    x, w = rand(4, 4), rand(4, 4)
    values, vectors = torch.linalg.eigh(x + x.t() + w + w.t())
    expected = torch.autograd.grad(values.sum(), (x, w), retain_graph=True)
    (gx,), weights = input_gradient((values, vectors), (torch.ones_like(values), None), (x,))
    weight_gradient(weights)
    same(gx, expected[0])
    same(w.grad, expected[1])


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_each_product_is_computed_once() -> None:
    x, parameters = rand(2, 4), [rand(4, 4) for _ in range(5)]
    y = x
    for w in parameters:
        y = torch.relu(y @ w)
    with Count() as whole_backward:
        torch.autograd.grad(y, (x, *parameters), torch.ones_like(y), retain_graph=True)
    with Count() as first:
        _, weights = input_gradient((y,), (torch.ones_like(y),), (x,))
    with Count() as second:
        weight_gradient(weights)
    assert whole_backward.ops["mm"] == 10
    assert (first.ops["mm"], second.ops["mm"]) == (5, 5)
    assert first.ops["threshold_backward"] == 5
    assert second.ops["threshold_backward"] == 0


@pytest.mark.parametrize("case", ["tied", "recurrent", "parallel"])
def test_a_weight_used_again_costs_nothing_more(case: str) -> None:
    task, takes, parameters = CASES[case]
    with Count() as whole_backward:
        whole(task, takes, parameters)
    with Count() as halves:
        outputs, grads = outputs_of(task, takes, parameters)
        _, weights = input_gradient(outputs, grads, takes)
        weight_gradient(weights)
    for op in ("mm", "addmm", "mul", "tanh_backward", "sigmoid_backward", "threshold_backward"):
        assert halves.ops[op] == whole_backward.ops[op], op


def test_what_only_parameters_reach_runs_once() -> None:
    # g and v make w, which two layers use: the gradients at w are added before its own backward
    task, takes, parameters = CASES["weight norm"]
    outputs, grads = outputs_of(task, takes, parameters)
    _, weights = input_gradient(outputs, grads, takes)
    with Count() as second:
        weight_gradient(weights)
    assert second.ops["_weight_norm_interface_backward"] == 1


def test_functions_in_python_run_once() -> None:
    x, w = rand(3), rand(3)
    y = Scale.apply(x, w).sin()
    Scale.backwards = 0
    _, weights = input_gradient((y,), (torch.ones_like(y),), (x,))
    assert Scale.backwards == 1
    weight_gradient(weights)
    assert Scale.backwards == 1


def test_what_is_kept_stays_as_it_was() -> None:
    # the gradient of `a` arrives at its node, is kept, and goes on: through views, sums, and back into itself
    x, w = rand(2, 3), rand(2, 3)
    a = x + w
    b = a.view(6) * 1
    y = (a + b.view(2, 3)) + a
    _, weights = input_gradient((y,), (torch.ones_like(y),), (x,))
    before = [[None if g is None else g.clone() for g in grads] for grads in weights.kept]
    kept = [list(grads) for grads in weights.kept]
    z = rand(2, 3)
    for _ in range(3):  # other tasks come between, on the same parameters
        _, other = input_gradient((z + w,), (torch.ones_like(y),), (z,))
        weight_gradient(other)
    for a_kept, b_kept in zip(kept, before, strict=True):
        for one, two in zip(a_kept, b_kept, strict=True):
            same(one, two)
    weight_gradient(weights)
    same(w.grad, torch.full((2, 3), 6.0, dtype=torch.float64))


def test_what_was_passed_on_stays_as_it_was() -> None:
    # the gradients of x and w are one piece of memory, and that of x is under way while w's is added up
    w, sent = rand(4), []
    for _ in range(3):
        x = rand(2, 2)
        (gx,), weights = input_gradient((x.view(4) + w.view(4),), (torch.ones_like(w),), (x,))
        weight_gradient(weights)
        unshare([w])
        sent.append(gx)
    for gx in sent:
        assert torch.equal(gx, torch.ones_like(x))
    assert torch.equal(w.grad, torch.full_like(w, 3.0))


def test_autocast_shares_its_casts_between_micro_batches() -> None:
    takes = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
    w = torch.randn(3, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = [F.linear(F.linear(x, w), w) for x in takes]
    grads = [torch.ones_like(y) for y in outputs]
    expected = torch.autograd.grad(outputs, [*takes, w], grads, retain_graph=True)
    halves = [input_gradient((y,), (g,), (x,)) for y, g, x in zip(outputs, grads, takes, strict=True)]
    for ((gx,), weights), b in zip(halves, expected, strict=False):
        assert torch.equal(gx, b)
        weight_gradient(weights)
    torch.testing.assert_close(w.grad, expected[-1], rtol=0.02, atol=0.05)


class Token:
    """Something that can be seen to go."""


class Marked(torch.autograd.Function):
    """Its node holds a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def test_the_graph_goes_when_the_second_half_is_done() -> None:
    x, w, token = rand(3), rand(3), Token()
    y = torch.sin(Marked.apply(torch.sin(x), token) * w)
    gone, grad = weakref.ref(token), torch.ones_like(y)
    del token
    gc.disable()
    try:
        found, weights = input_gradient((y,), (grad,), (x,))
        del y
        assert gone() is not None
        weight_gradient(weights)
        assert gone() is None
    finally:
        gc.enable()
    assert found[0] is not None


def test_without_parameters_the_graph_goes_at_once() -> None:
    x = rand(3)
    y = torch.sin(x)
    _, weights = input_gradient((y,), (torch.ones_like(y),), (x,))
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(torch.ones_like(y))
    weight_gradient(weights)


def test_a_parameter_written_between_the_halves() -> None:
    x, w = rand(2, 3), rand(3, 3)
    y = F.linear(torch.sin(x @ w), w)
    _, weights = input_gradient((y,), (torch.ones_like(y),), (x,))
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weight_gradient(weights)


def test_an_error_comes_out_as_it_is() -> None:
    class Oops(Exception):
        pass

    def fail(grad: Tensor) -> None:
        raise Oops

    x, w = rand(3), rand(3)
    u = w * 1
    u.register_hook(fail)
    y = x * u
    _, weights = input_gradient((y,), (torch.ones_like(y),), (x,))
    with pytest.raises(Oops):
        weight_gradient(weights)


def test_on_another_thread_and_without_grad_mode() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def step() -> tuple[Any, Any]:
        x, w = rand(3), rand(3)
        y = (x * w).sin() * w
        with torch.no_grad():
            (gx,), weights = input_gradient((y,), (torch.ones_like(y),), (x,))
            weight_gradient(weights)
        return gx, w.grad

    expected = step()
    with ThreadPoolExecutor(2) as pool:
        for found in [pool.submit(step) for _ in range(50)]:
            for a, b in zip(found.result(), expected, strict=True):
                assert torch.equal(a, b)


def test_modules() -> None:
    torch.manual_seed(0)
    for model, x in (
        (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), torch.randn(2, 3, 8)),
        (nn.GRU(4, 4, 2, batch_first=True, bidirectional=True), torch.randn(2, 3, 4)),
        (nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.PReLU(6), nn.Flatten()), torch.randn(2, 3, 5, 5)),
    ):
        model.double()
        names = [name for name, _ in model.named_parameters()]

        def task(x: Tensor, *parameters: Tensor, model: Any = model, names: Any = names) -> Any:
            found = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (x,))
            return found if isinstance(found, Tensor) else tuple(found)

        check(task, (x.double().requires_grad_(),), tuple(model.parameters()))


# -- random graphs ----------------------------------------------------------------------------------------------------

BINARY: tuple[Callable[..., Tensor], ...] = (torch.add, torch.mul, torch.matmul, torch.maximum, Scale.apply)
UNARY: tuple[Callable[..., Tensor], ...] = (
    torch.sin,
    torch.t,
    lambda x: x * 1,
    lambda x: x.chunk(3)[1].expand(3, 3),
    lambda x: x.clone().mul_(0.5),
    lambda x: F.layer_norm(x, (3,)),
    lambda x: x.detach(),
)
STEPS = st.lists(st.tuples(st.integers(0, len(BINARY) + len(UNARY) - 1), st.integers(0, 99), st.integers(0, 99)))


@settings(max_examples=150, deadline=None)
@given(
    steps=STEPS,
    outputs=st.lists(st.integers(0, 99), min_size=1, max_size=3),
    enough=st.sampled_from([0, 1 << 20]),
    letting_go=st.booleans(),
)
def test_random_graphs(steps: list[tuple[int, int, int]], outputs: list[int], enough: int, letting_go: bool) -> None:
    def task(*values: Tensor) -> tuple[Tensor, ...]:
        found = list(values)
        for op, a, b in steps:
            x, y = found[a % len(found)], found[b % len(found)]
            z = BINARY[op](x, y) if op < len(BINARY) else UNARY[op - len(BINARY)](x)
            found.append(torch.tanh(z))
        return tuple([found[-1 - k % len(found)] for k in outputs])

    takes = [rand(3, 3), rand(3, 3) + 1, rand(3, 3, grad=False)]
    takes[1] = takes[1].detach().requires_grad_()
    parameters = [(rand(3, 3) * k).detach().requires_grad_() for k in (2, 3)]
    before, split.ENOUGH = split.ENOUGH, enough
    try:
        if any(y.requires_grad for y in task(*takes, *parameters)):
            check(task, takes, parameters, saved=Saved() if letting_go else None)
    finally:
        split.ENOUGH = before
