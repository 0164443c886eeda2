"""What a message about lines that cannot be traced says to write instead: it is written, and works."""

from __future__ import annotations

import logging
import zlib
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.remedies import WIDTH, Case, Net, Part, Step, X, cases, check, steps_right

log = logging.getLogger("model")
FOUND: ContextVar[int] = ContextVar("found")
CHECKSUM = zlib.crc32(b"model") % 7
LENGTHS = torch.tensor([5, 3, 2, 4])
LONG = torch.randn(4, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


# Ways that depend on values -----------------------------------------------------------------------------------------


def limited_by_if(self: Part, h: Tensor) -> Tensor:
    norm = self.fc.weight.norm()
    if norm > 1:
        h = h / norm
    return self.fc(h)


def limited(self: Part, h: Tensor) -> Tensor:
    norm = self.fc.weight.norm()
    h = torch.where(norm > 1, h / norm, h)
    return self.fc(h)


def by_index(self: Part, h: Tensor) -> Tensor:
    best = self.fc.bias.argmax()
    return self.fc(h) * h[:, best].unsqueeze(1)


def by_index_of_a_tensor(self: Part, h: Tensor) -> Tensor:
    best = self.fc.bias.argmax()
    return self.fc(h) * h[:, best[None]]


def to_a_buffer(self: Part, h: Tensor) -> Tensor:
    for _ in range(int(self.count)):
        h = self.fc(h)
    return h


def by_item(self: Part, h: Tensor) -> Tensor:
    return self.fc(h) * 2 if self.count.item() > 1 else self.fc(h)


def by_where(self: Part, h: Tensor) -> Tensor:
    return torch.where(self.count > 1, self.fc(h) * 2, self.fc(h))


def to_an_input(self: Part, h: Tensor, count: Tensor) -> Tensor:
    for _ in range(int(count)):
        h = self.fc(h)
    return h


def to_an_int(self: Part, h: Tensor) -> Tensor:
    for _ in range(self.depth):
        h = self.fc(h)
    return h


def of_a_list(self: Part, h: Tensor) -> Tensor:
    return self.fc(h) * self.fc.bias.tolist()[0]


def of_a_tensor(self: Part, h: Tensor) -> Tensor:
    return self.fc(h) * self.fc.bias[0].detach()


def by_unique(self: Part, h: Tensor) -> Tensor:
    values, places = torch.unique(self.fc(h).argmax(1), return_inverse=True)
    return self.fc(h) + values[places].unsqueeze(1)


def by_mask(self: Part, h: Tensor) -> Tensor:
    best = self.fc(h).argmax(1)
    return self.fc(h) + torch.where(best > 0, best, 0).unsqueeze(1)


# What a trace does not see ------------------------------------------------------------------------------------------


def prints(self: Part, h: Tensor) -> Tensor:
    print("norm", h.norm())
    return self.fc(h)


def prints_plainly(self: Part, h: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        print("norm", h.norm())
    return self.fc(h)


def logs(self: Part, h: Tensor) -> Tensor:
    log.setLevel(logging.INFO)
    return self.fc(h)


def logs_plainly(self: Part, h: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        log.setLevel(logging.INFO)
    return self.fc(h)


def in_c(self: Part, h: Tensor) -> Tensor:
    return self.fc(h) * (zlib.crc32(b"model") % 7)


def with_numpy(self: Part, h: Tensor) -> Tensor:
    weights = numpy.linspace(0, 1, WIDTH)
    return self.fc(h) * torch.from_numpy(weights)


def with_torch(self: Part, h: Tensor) -> Tensor:
    weights = torch.linspace(0, 1, WIDTH, dtype=torch.float64)
    return self.fc(h) * weights


def of_numpys_root(self: Part, h: Tensor, **options: Any) -> Tensor:
    return self.fc(h) / torch.tensor(numpy.sqrt(2), **options)


def of_torchs_root(self: Part, h: Tensor) -> Tensor:
    return self.fc(h) / torch.sqrt(torch.tensor(2, dtype=torch.float64))


def sets_a_variable(self: Part, h: Tensor) -> Tensor:
    FOUND.set(1)
    return self.fc(h)


def resets_a_variable(self: Part, h: Tensor) -> Tensor:
    before = FOUND.set(1)
    h = self.fc(h)
    FOUND.reset(before)
    return h


class Recurrent(nn.Module):
    def __init__(self, packs: bool) -> None:
        super().__init__()
        self.packs, self.rnn = packs, nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if self.packs:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=5)[0].sum(1)
        mask = torch.arange(5) < lengths[:, None]
        return (self.rnn(x)[0] * mask[..., None]).sum(1)


class Recurrences(Net):
    def __init__(self, packs: bool) -> None:
        super().__init__()
        self.part = Recurrent(packs)  # type: ignore[assignment]


# Gradients and parameters -------------------------------------------------------------------------------------------


def by_autograd(self: Part, h: Tensor) -> Tensor:
    h = h.detach().requires_grad_()
    return torch.autograd.grad(self.fc(h).square().sum(), h, create_graph=True)[0]


def by_torch_func(self: Part, h: Tensor) -> Tensor:
    return torch.func.grad(lambda x: self.fc(x).square().sum())(h.detach())


def written_out(self: Part, h: Tensor) -> Tensor:
    return 2 * self.fc(h.detach()) @ self.fc.weight


def hangs_a_hook(self: Part, h: Tensor) -> Tensor:
    h = self.fc(h)
    h.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return h


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.01, 0.01)


def clamps(self: Part, h: Tensor) -> Tensor:
    return Clamped.apply(self.fc(h))


class Hooked(Net):
    def __init__(self, on_module: bool) -> None:
        super().__init__()
        if on_module:
            self.part.fc.register_full_backward_hook(lambda module, grads, of: (2 * grads[0],))
        else:
            self.part.fc.weight.register_hook(lambda gradient: 2 * gradient)


def sets_a_parameter(self: Part, h: Tensor) -> Tensor:
    self.fc._parameters["weight"] = F.normalize(self.fc.weight)  # type: ignore[assignment]
    return self.fc(h)


def drops_a_parameter(self: Part, h: Tensor) -> Tensor:
    self.fc.bias = None  # type: ignore[assignment]
    return self.fc(h)


def ties_a_parameter(self: Net, h: Tensor) -> Tensor:
    self.last.weight = self.first.weight
    return self.last(self.part(h))


def with_the_other_tensor(self: Net, h: Tensor) -> Tensor:
    return F.linear(self.part(h), self.first.weight, self.last.bias)


def sets_data(self: Part, h: Tensor) -> Tensor:
    self.fc.weight.data = F.normalize(self.fc.weight.data)
    return self.fc(h)


def copies_to_data(self: Part, h: Tensor) -> Tensor:
    self.fc.weight.data.copy_(F.normalize(self.fc.weight.data))
    return self.fc(h)


def adds_a_buffer(self: Part, h: Tensor) -> Tensor:
    if not hasattr(self, "scale"):
        self.register_buffer("scale", torch.full((WIDTH,), 2.0, dtype=torch.float64))
    return self.fc(h) * self.scale


def called_before() -> nn.Module:
    model = Net(adds_a_buffer).double()
    model(X)
    return model


def sets_no_buffer(self: Part, h: Tensor) -> Tensor:
    self.seen = None  # type: ignore[assignment]
    return self.fc(h)


def sets_zeros(self: Part, h: Tensor) -> Tensor:
    self.seen = torch.zeros_like(self.seen)
    return self.fc(h)


def sets_the_batch(self: Part, h: Tensor) -> Tensor:
    self.seen = h.detach().sum(1)
    return self.fc(h)


def adds_to_an_attribute(self: Part, h: Tensor) -> Tensor:
    self.plain += self.fc.weight.detach().norm()
    return self.fc(h)


def adds_to_a_buffer(self: Part, h: Tensor) -> Tensor:
    self.seen += self.fc.weight.detach().norm()
    return self.fc(h)


NORMALIZED = partial(Net, lambda self, h: F.linear(h, F.normalize(self.fc.weight), self.fc.bias))
WITHOUT_BIAS = partial(Net, lambda self, h: F.linear(h, self.fc.weight))
CONST = "a plain tensor attribute; make it a buffer: self.register_buffer('plain', ...)"
SET = "(parameter) to {}; compute with the other tensor itself, as in torch.nn.functional.linear(x, weight)"


def of_part(before: Any, after: Any, *said: str, line: bool = True) -> Case:
    """A case of a body in the middle of a net."""
    return Case(said, Step(partial(Net, before)), Step(partial(Net, after)), line)


TRACED = {
    "if": of_part(limited_by_if, limited, "part is kept whole", "which way it goes", "write torch.where(condition, a"),
    "index": of_part(by_index, by_index_of_a_tensor, "part is kept whole", "an index", "write x[i[None]]"),
    "range": of_part(to_a_buffer, to_an_int, "as a Python number", "counts to, make an int of the model's"),
    "item": of_part(by_item, by_where, "turns a tensor's value into a Python number", "the operations take 0-dim"),
    "tolist": of_part(of_a_list, of_a_tensor, "turns a tensor's value into a Python number", "keep it a tensor"),
    "unique": of_part(by_unique, by_mask, "the shape of its result depends", "torch.where(mask, x, 0)"),
    "print": of_part(prints, prints_plainly, "it prints or logs", "if not torch.compiler.is_compiling():"),
    "log": of_part(logs, logs_plainly, "it prints or logs", "if not torch.compiler.is_compiling():"),
    "C": Case(
        ("written in C", "call it before, and pass what it returns to the model"),
        Step(partial(Net, in_c)),
        Step(partial(Net, lambda self, h, checksum: self.fc(h) * checksum), (CHECKSUM,)),
    ),
    "numpy": of_part(with_numpy, with_torch, "it computes with numpy", "write it with torch"),
    "numpy's float": of_part(
        of_numpys_root,
        partial(of_numpys_root, dtype=torch.float64),
        "a tensor of a number of numpy's",
        "give torch.tensor a dtype",
    ),
    "numpy's function": of_part(of_numpys_root, of_torchs_root, "or numpy's function a tensor, as in torch.sqrt"),
    "context variable": of_part(
        sets_a_variable, resets_a_variable, "sets the context variable 'found'; reset it in the end", line=False
    ),
    "packed": Case(
        ("it packs sequences", "leave the padding in, and mask what comes of it"),
        Step(partial(Recurrences, True), (LENGTHS,), x=LONG),
        Step(partial(Recurrences, False), (LENGTHS,), x=LONG),
    ),
    "model's own": Case(
        ("Net is kept whole, and nothing is pipelined", "or, to have it traced, write torch.where(condition, a, b)"),
        Step(partial(Net, join=lambda self, h: self.last(limited_by_if(self.part, h)))),
        Step(partial(Net, join=lambda self, h: self.last(limited(self.part, h)))),
    ),
    "moved": Case(
        ("Net is kept whole, and nothing is pipelined", "move these lines into the forward of a submodule"),
        Step(partial(Net, join=lambda self, h: self.last(limited_by_if(self.part, h)))),
        Step(partial(Net, limited_by_if)),
        kept=True,
    ),
}
GRADIENTS = {
    "autograd.grad": of_part(by_autograd, written_out, "takes derivatives inside of forward", "write them out, as op"),
    "func.grad": of_part(by_torch_func, written_out, "takes derivatives inside of forward", "write them out, as op"),
    "hook": of_part(hangs_a_hook, clamps, "hangs a hook on a value", "write an autograd.Function whose backward"),
    "module's hook": Case(
        ("has a backward hook, which would not run", "as in weight.register_hook(...)"),
        Step(partial(Hooked, True)),
        Step(partial(Hooked, False)),
        line=False,
    ),
    "set parameter": Case(
        (SET.format("another tensor"),), Step(partial(Net, sets_a_parameter)), Step(NORMALIZED), line=False
    ),
    "no parameter": Case((SET.format("None"),), Step(partial(Net, drops_a_parameter)), Step(WITHOUT_BIAS), line=False),
    "tied": Case(
        (SET.format("another tensor"),),
        Step(partial(Net, join=ties_a_parameter)),
        Step(partial(Net, join=with_the_other_tensor)),
        line=False,
    ),
    "parameter's data": of_part(sets_data, copies_to_data, "write weight.data.copy_(x) in place of weight.data = x"),
    "added buffer": Case(
        ("forward adds part.scale", "or run the model once before: model(x)"),
        Step(partial(Net, adds_a_buffer)),
        Step(called_before),
        line=False,
    ),
    "no buffer": of_part(sets_no_buffer, sets_zeros, "such as torch.zeros_like(self.seen)", line=False),
    "buffer of the batch": of_part(
        sets_the_batch,
        lambda self, h: self.fc(h) + 0 * h.detach().sum(1, keepdim=True),
        "sets the buffer part.seen, f64[4], to f64[b]",
        "return the tensor instead",
    ),
    "attribute": of_part(adds_to_an_attribute, adds_to_a_buffer, "writes into part.plain", CONST),
}


SLOW = (
    "packed", "unique", "numpy's function", "numpy's float", "moved", "C", "log", "func.grad", "no parameter",
    "no buffer", "range", "context variable", "buffer of the batch", "model's own", "added buffer", "module's hook",
)  # fmt: skip


@cases(TRACED | GRADIENTS, SLOW)
def test_what_a_message_says_to_write(case: Case) -> None:
    check(case, Path(__file__).name)


def test_a_number_that_an_input_is() -> None:
    steps_right(Step(partial(Net, to_an_input), (torch.tensor(3),)))
