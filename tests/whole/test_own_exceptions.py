"""The model's own exceptions are the user's: what the plain code raises on these inputs, with a note, and the model is
left as it was."""

from __future__ import annotations

import random
import re
import traceback
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.capture import CallCapture, capture
from fxpipe.errors import CaptureError, InputError

X, Y = torch.randn(8, 4), torch.arange(8) % 3


class Net(nn.Module):
    def __init__(self, form: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()
        self.head, self.form, self.calls = nn.Linear(4, 3), form, 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        self.calls = self.calls + 1
        return self.form(self.head(self.drop(self.norm(self.fc(x)))) * scale)


def no_target(output: Tensor) -> Tensor:
    return output.sum()


def weighted(output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return (F.cross_entropy(output, target, reduction="none") * weight).sum()


def wrong_name(output: Tensor, target: Tensor) -> Tensor:
    return F.crossentropy(output, target)  # type: ignore[attr-defined]


LOSS = "while fxpipe captured Net with its loss; without fxpipe the loss raises the same, given "
MODEL = "while fxpipe captured Net; without fxpipe it raises the same, given "
TWO = "it is called as loss_fn(output, target): write a function of these two"
ONE = "it is called as loss_fn(output), for the step was given no target: write pipe.step(x, target=y, loss_fn=loss_fn)"
TUPLE = (
    "the model returns no tensor: write loss_fn=lambda output, target: cross_entropy(output{}, target), with whatever "
    "of the output the loss is made of"
)
FORWARD = "it is Net.forward(x: 'Tensor', scale: 'float' = 1.0) -> 'Any'"
STEP = "what step() is given goes to the model, but for its own options: write pipe.step(x, target=y, loss_fn=loss_fn)"
# The arguments of a step, the model's form, and the notes.
STEPS: dict[str, tuple[dict[str, Any], Any, list[str]]] = {
    "forgotten target": ({"loss_fn": F.cross_entropy}, None, [LOSS + "output f32[8, 3]", ONE]),
    "forgotten target of a module": ({"loss_fn": nn.CrossEntropyLoss()}, None, [LOSS + "output f32[8, 3]", ONE]),
    "float targets": (
        {"target": Y.float(), "loss_fn": F.cross_entropy},
        None,
        [LOSS + "output f32[8, 3] and target f32[8]"],
    ),
    "loss of one": ({"target": Y, "loss_fn": no_target}, None, [LOSS + "output f32[8, 3] and target i64[8]", TWO]),
    "loss of three": ({"target": Y, "loss_fn": weighted}, None, [LOSS + "output f32[8, 3] and target i64[8]", TWO]),
    "a tuple": (
        {"target": Y, "loss_fn": F.cross_entropy},
        lambda y: (y, y * 2),
        [LOSS + "output (f32[8, 3], f32[8, 3]) and target i64[8]", TUPLE.format("[0]")],
    ),
    "a dict": (
        {"target": Y, "loss_fn": F.cross_entropy},
        lambda y: {"scores": [y]},
        [LOSS + "output {'scores': [f32[8, 3]]} and target i64[8]", TUPLE.format("['scores'][0]")],
    ),
    "another shape": (
        {"target": Y, "loss_fn": F.mse_loss},
        None,
        [LOSS + "output f32[8, 3] and target i64[8]"],
    ),
    "wrong name": ({"target": Y, "loss_fn": wrong_name}, None, [LOSS + "output f32[8, 3] and target i64[8]"]),
    "features": ({"x": torch.randn(8, 5), "target": Y, "loss_fn": F.cross_entropy}, None, [MODEL + "x f32[8, 5]"]),
    "no input": ({"x": None, "target": Y, "loss_fn": F.cross_entropy}, None, [FORWARD, STEP]),
    "unknown argument": (
        {"targets": Y, "loss_fn": F.cross_entropy},
        None,
        [FORWARD + "; did you mean step's target=?", STEP],
    ),
}


def raised_by(run: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        run()
    return caught.value


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("case", STEPS)
def test_a_step(case: str) -> None:
    given, form, notes = STEPS[case]
    model = Net(form or (lambda y: y))
    options = {"x": X} | given
    args = [] if options["x"] is None else [options["x"]]
    del options["x"]
    loss_fn = options.pop("loss_fn")
    targets = [options.pop("target")] if "target" in options else []
    expected = raised_by(lambda: loss_fn(model(*args, **options), *targets))
    model.calls = 0
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state(), random.getstate()
    with closing(fxpipe.compile(model, devices=2, chunks=4)) as pipe:
        error = raised_by(lambda: pipe.step(*args, loss_fn=loss_fn, **options, **dict(zip(["target"], targets))))  # noqa: B905
    assert type(error) is type(expected)
    assert str(error) == str(expected)
    assert error.__notes__ == notes
    assert error.__cause__ is None
    assert error.__context__ is None
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    if case == "wrong name":
        assert traceback.extract_tb(error.__traceback__)[-1].line.startswith("return F.crossentropy(output, target)")


@pytest.mark.parametrize(
    ("args", "kwargs", "notes"),
    [
        ((torch.randn(8, 5),), {}, [MODEL + "x f32[8, 5]"]),
        ((), {}, [FORWARD]),
        ((X,), {"mask": 1}, [FORWARD]),
        ((X, 1.0, 2), {}, [FORWARD]),
        ((X.tolist(),), {}, [MODEL.removesuffix(", given ")]),
    ],
)
def test_a_call(args: Any, kwargs: Any, notes: list[str]) -> None:
    model = Net()
    expected = raised_by(lambda: model(*args, **kwargs))
    with closing(fxpipe.compile(model, devices=2, chunks=4)) as pipe:
        error = raised_by(lambda: pipe(*args, **kwargs))
    assert (type(error), str(error), error.__notes__) == (type(expected), str(expected), notes)


class Checked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != 4:
            raise ValueError("four columns, please")
        return self.fc(x)


def test_a_later_kind_of_call() -> None:
    with closing(fxpipe.compile(nn.Sequential(Checked(), Checked()), devices=2, chunks=2)) as pipe:
        pipe(X)
        with pytest.raises(ValueError, match="four columns, please") as caught:
            pipe(torch.randn(8, 3))
        assert caught.value.args == ("four columns, please",)
        assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "forward"
        pipe(X)


def test_an_argument_that_a_decorator_adds() -> None:
    import functools

    def with_two(forward: Any) -> Any:
        @functools.wraps(forward)
        def run(self: Any, *args: Any) -> Any:
            return forward(self, *args, 2.0)

        return run

    class Decorated(Checked):
        @with_two
        def forward(self, x: Tensor, factor: float) -> Tensor:
            return self.fc(x) * factor

    model = Decorated()
    with closing(fxpipe.compile(model, devices=1, chunks=2)) as pipe:
        torch.testing.assert_close(pipe(X), model(X))


def test_a_loss_of_the_wrong_type() -> None:
    with closing(fxpipe.compile(Net(), devices=2, chunks=4)) as pipe:
        for loss_fn, message in (
            ("mse", "loss_fn is 'mse'; pass a function of the output and the target, or a module"),
            (nn.CrossEntropyLoss, "loss_fn is the class CrossEntropyLoss; write loss_fn=CrossEntropyLoss()"),
        ):
            with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
                pipe.step(X, target=Y, loss_fn=loss_fn)


def test_a_target_of_another_batch_size() -> None:
    with closing(fxpipe.compile(Net(), devices=2, chunks=4)) as pipe:
        with pytest.raises(InputError) as caught:
            pipe.step(X, target=Y[:3], loss_fn=F.cross_entropy)
    assert str(caught.value) == (
        "the inputs have no common batch size:\n"
        "    x: 8 in dimension 0 of (8, 4)\n"
        "    target: 3 in dimension 0 of (3,)\n"
        "give as many samples of each; or write batch_dim={'target': None} to give an input whole to every "
        "micro-batch, or its dimension in place of None"
    )


# What is no batch -----------------------------------------------------------------------------------------------------


def line(model: nn.Module) -> str:
    code = type(model).forward.__code__
    return f"{__file__}:{code.co_firstlineno + 1}"


def test_features_taken_for_the_batch() -> None:
    class Features(Checked):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.fc.weight

    model = Features()
    with closing(fxpipe.compile(model, devices=1, chunks=2)) as pipe, pytest.raises(CaptureError) as caught:
        pipe(X[0])
    assert str(caught.value).startswith(
        f"{line(model)}\n    return x @ self.fc.weight\n"
        "dimension 0 of x, f32[4], was taken for the batch, and Features, which runs on 4 samples, does not run on "
        "2: it raises RuntimeError: "
    )
    assert str(caught.value).endswith(
        "\nIf x has no batch, write batch_dim={'x': None}: every micro-batch gets all of it. If Features needs a "
        "batch of 4, write chunks=1"
    )
    assert caught.value.__cause__ is None
    for way in ({"chunks": 1}, {"chunks": 2, "batch_dim": {"x": None}}):
        with closing(fxpipe.compile(model, devices=1, **way)) as pipe:
            torch.testing.assert_close(pipe(X[0]), model(X[0]))


MASK = torch.rand(8, 1)


def test_a_default_of_batch_size() -> None:
    class Masked(Checked):
        def forward(self, x: Tensor, mask: Tensor = MASK) -> Tensor:
            return self.fc(x) * mask

    model = Masked()
    with closing(fxpipe.compile(model, devices=1, chunks=1)) as pipe:
        torch.testing.assert_close(pipe(X), model(X))
    with closing(fxpipe.compile(model, devices=1, chunks=2)) as pipe:
        with pytest.raises(CaptureError) as caught:
            pipe(X)
        assert str(caught.value).startswith(
            f"{line(model)}\n    return self.fc(x) * mask\ndimension 0 of x, f32[8, 4], "
        )
        assert str(caught.value).endswith(
            "\nThe default of mask, f32[8, 1], has the size of the batch and is not cut: pass it in the call, as in "
            "pipe(..., mask=mask)"
        )
        torch.testing.assert_close(pipe(X, mask=MASK), model(X))


# Names that torch has for sizes ---------------------------------------------------------------------------------------


def test_sizes_have_the_users_names() -> None:
    """Of a model on the meta device nothing can be run, so the error is torch's."""

    class Product(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x @ torch.ones(5, 3, device="meta") + y

    front, said = CallCapture(Product()), []
    front.capture((torch.empty(4, 5, device="meta"), torch.empty(4, 3, device="meta")), {})
    for shape in ((4, 6), (4, 5, 6)):
        with pytest.raises(CaptureError) as caught:
            front.capture((torch.empty(shape, device="meta"), torch.empty(4, 3, device="meta")), {})
        said.append(str(caught.value).splitlines()[2])
    assert "got [b, x.shape[1]] X [5, 3]" in said[0]
    assert not re.search(r"\b[su]\d+\b", said[1])


def test_a_size_that_depends_on_data_has_no_name() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.fc(torch.nonzero(x).float())
            return made

    with pytest.raises(CaptureError) as caught:
        capture(Sized(), (torch.empty(4, 3, device="meta"),))
    assert not re.search(r"\b[su]\d+\b", str(caught.value))


class Shrinks(Checked):
    """Writes into its parameter, and then raises."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.fc.weight.mul_(0.5)
            self.fc.bias.data.add_(1.0)
        y = self.fc(x)
        raise ValueError(f"not this: {y.shape}")


def test_parameters_are_as_they_were() -> None:
    model = Shrinks()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    own = dict(model.named_parameters())
    with closing(fxpipe.compile(model, devices=1, chunks=2)) as pipe, pytest.raises(ValueError, match="not this"):
        pipe(X)
    for name, parameter in model.named_parameters():
        assert parameter is own[name]
        assert torch.equal(parameter, before[name])


def test_a_layer_without_sizes_stays_one() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    with closing(fxpipe.compile(model, devices=1, chunks=2)) as pipe:
        with pytest.raises(CaptureError, match=r"0\.(weight|bias) has no shape yet"):
            pipe(X)
        model(X)
        torch.testing.assert_close(pipe(X), model(X))
