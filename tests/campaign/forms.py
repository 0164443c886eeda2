"""What goes into random models beside their first input, what they return, and the losses of their steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Extra:
    """One more input: how it is made for `batch` samples, its default, if it has one, and classes that it needs."""

    made: str
    default: str = ""
    top: str = ""


SIDE = "@dataclass\nclass Side:\n    left: Tensor\n    right: Tensor\n    note: str = 'side'"
INPUTS = {
    "number": Extra("0.7", default="1.0"),
    "flag": Extra("True", default="False"),
    "mode": Extra("'wide'", default="'narrow'"),
    "absent": Extra("None", default="None"),
    "tokens": Extra("torch.randint(0, 11, (batch, 5))"),
    "mask": Extra("torch.arange(5) < torch.randint(1, 6, (batch, 1))"),
    "picture": Extra("torch.randn(batch, 3, 6, 6, dtype=torch.float64)"),
    "other": Extra("torch.randn(batch, 6, dtype=torch.float64, requires_grad=True)"),
    "extras": Extra(
        "{'a': torch.randn(batch, 4, dtype=torch.float64, requires_grad=True),"
        " 'b': torch.rand(batch, 1, dtype=torch.float64)}"
    ),
    "side": Extra(
        "Side(torch.randn(batch, 4, dtype=torch.float64), torch.randn(batch, 1, dtype=torch.float64, "
        "requires_grad=True))",
        top=SIDE,
    ),
}


@dataclass(frozen=True)
class Form:
    """How outputs are returned: the expression for their names, and how a loss reads each of so many values."""

    text: Callable[[Sequence[str]], str]
    reads: Callable[[int], list[str]]
    top: tuple[str, ...] = ()
    several: bool = True
    own_loss: bool = False


def rest(names: Sequence[str]) -> str:
    return ", ".join(names[1:])


RESULT = "@dataclass\nclass Result:\n    head: Tensor\n    rest: list[Tensor]\n    note: str = 'result'"
NAMED = "class Named(NamedTuple):\n    head: Tensor\n    rest: dict[str, Tensor]"
WITH_LOSS = "@dataclass\nclass WithLoss:\n    loss: Tensor\n    head: Tensor\n    rest: tuple[Tensor, ...] = ()"
FORMS = {
    "tensor": Form(lambda names: names[0], lambda count: ["output"], several=False),
    "tuple": Form(lambda names: f"({', '.join(names)},)", lambda count: [f"output[{i}]" for i in range(count)]),
    "list": Form(
        lambda names: f"[{', '.join(reversed(names))}]", lambda count: [f"output[{-1 - i}]" for i in range(count)]
    ),
    "dict": Form(
        lambda names: "{" + ", ".join(f"'out{i}': {name}" for i, name in enumerate(names)) + "}",
        lambda count: [f"output['out{i}']" for i in range(count)],
    ),
    "nested": Form(
        lambda names: (
            f"[{names[0]}, {{'rest': ({rest(names)},), 'none': None, 'number': 3}}]"
            if len(names) > 1
            else f"[{names[0]}, {{'none': None, 'number': 3}}]"
        ),
        lambda count: ["output[0]", *(f"output[1]['rest'][{i}]" for i in range(count - 1))],
    ),
    "dataclass": Form(
        lambda names: f"Result({names[0]}, [{rest(names)}])",
        lambda count: ["output.head", *(f"output.rest[{i}]" for i in range(count - 1))],
        (RESULT,),
    ),
    "named tuple": Form(
        lambda names: f"Named({names[0]}, {{" + ", ".join(f"'{i}': {name}" for i, name in enumerate(names[1:])) + "})",
        lambda count: ["output.head", *(f"output.rest['{i}']" for i in range(count - 1))],
        (NAMED,),
    ),
    "own loss": Form(
        lambda names: (
            f"WithLoss({' + '.join(f'{name}.square().mean()' for name in names)}, {names[0]}, ({rest(names)}"
            + (",))" if len(names) > 1 else "))")
        ),
        lambda count: ["output.head", *(f"output.rest[{i}]" for i in range(count - 1))],
        (WITH_LOSS,),
        own_loss=True,
    ),
}


@dataclass(frozen=True)
class Loss:
    """The loss of a step: an expression of `$first`, the first output, with `target`; what each other output adds; and
    how the target is made ("" where there is none)."""

    first: str
    other: str = ""
    target: str = "torch.randn(batch, 3, dtype=torch.float64)"

    def text(self, reads: Sequence[str]) -> str:
        if not self.first:
            return "def make_target(batch):\n    return None\n\n\nloss_fn = None"
        terms = [self.first.replace("$first", reads[0])]
        terms += [
            self.other.replace("$other", read).replace("$k", str(k))
            for k, read in enumerate(reads[1:], 2)
            if self.other
        ]
        made = f"def make_target(batch):\n    return {self.target or None}\n\n\n"
        return made + f"def loss_fn(output{', target' if self.target else ''}):\n    return {' + '.join(terms)}"


LOSSES = {
    "own": Loss(""),
    "total": Loss("$first.sin().sum()", "$k * $other.sin().sum()", ""),
    "mean": Loss("$first.square().mean()", "$other.sin().mean()", ""),
    "mse": Loss("F.mse_loss($first, target)", "0.1 * $other.square().mean()"),
    "first alone": Loss("F.mse_loss($first, target, reduction='sum')"),
    "per sample": Loss("F.smooth_l1_loss($first, target, reduction='none').sum(1)", "$other.flatten(1).cos().mean(1)"),
    "cross entropy": Loss(
        "F.cross_entropy($first, target, ignore_index=-100)",
        target="torch.randint(0, 3, (batch,)).where(torch.arange(batch) % 3 != 1, -100)",
    ),
    "weighted cross entropy": Loss(
        "F.cross_entropy($first, target, weight=torch.tensor([1.0, 2.0, 0.5], dtype=$first.dtype), "
        "label_smoothing=0.1)",
        target="torch.randint(0, 3, (batch,))",
    ),
    "several": Loss(
        "0.5 * F.l1_loss($first, target['a']) + 2 * F.binary_cross_entropy_with_logits($first, target['b'])",
        "0.3 * $other.tanh().mean()",
        "{'a': torch.randn(batch, 3, dtype=torch.float64), 'b': torch.rand(batch, 3, dtype=torch.float64)}",
    ),
    "masked mean": Loss(
        "((($first - target[0]) ** 2).sum(1) * target[1]).sum() / target[1].sum()",
        target="(torch.randn(batch, 3, dtype=torch.float64), (torch.arange(batch) % 4 != 3).double())",
    ),
    "divergence": Loss(
        "F.kl_div(F.log_softmax($first, -1), target.softmax(-1), reduction='batchmean')", "$other.sin().mean()"
    ),
}
