"""What errors of a capture say: the line, what is wrong with the value, what to write instead."""

import pytest
import torch
from torch import nn

from fxpipe.capture import NO_TARGET, CallCapture, StepCapture
from fxpipe.errors import CaptureError

X = torch.randn(4, 3)


class Model(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.fc, self.cache = body, nn.Linear(3, 3), torch.ones(5, 3)

    def forward(self, x):
        return self.body(self, x)


def place(function):
    """How the line of a lambda is shown."""
    code = function.__code__
    with open(__file__) as file:
        return f"{__file__}:{code.co_firstlineno}\n    {file.readlines()[code.co_firstlineno - 1].strip()}\n"


BODIES = [
    (
        lambda self, x: (x * 1, torch.arange(x.shape[0])[:, None] * self.fc.weight[:1]),
        X,
        "numbers the samples of the batch, and is returned as mul_1, but each micro-batch counts from 0; compute it "
        "from what the pipe returns, or pass the numbers as an input",
    ),
    (
        lambda self, x: self.fc(x.repeat(2, 1)),
        X,
        "the output linear, f32[2*b, 3], has other things before the batch in one dimension, so that micro-batches "
        "cannot be joined; return it with a dimension for the batch alone, and reshape what the pipe returns",
    ),
    (
        lambda self, x: (x * 1, x.shape[0] + 1),
        X,
        "the output add is a number that depends on the batch size, and each micro-batch has another; return the "
        "tensor that has this size, and ask what the pipe returns for it",
    ),
    (
        lambda self, x: (x * 2).squeeze(),
        X[:1],
        "squeeze without a dimension also takes away a batch of one; name the dimension, as in x.squeeze(1)",
    ),
]


@pytest.mark.parametrize(("body", "x", "message"), BODIES)
def test_a_call(body, x, message):
    with pytest.raises(CaptureError) as caught:
        CallCapture(Model(body)).capture((x,), {})
    assert str(caught.value) == place(body) + message


LINEAR = lambda self, x: self.fc(x)  # noqa: E731
LOSSES = [
    (
        lambda output: output.detach().mean(),
        "loss_fn returns a loss that needs no gradient; compute it from parameters with requires_grad=True, without "
        "detach() or torch.no_grad()",
    ),
    (
        lambda output: output.mean(0),
        "loss_fn returns f32[3], which is neither one number nor one for each sample; take the mean or the sum of it",
    ),
]


@pytest.mark.parametrize(("loss_fn", "message"), LOSSES)
def test_a_loss(loss_fn, message):
    with pytest.raises(CaptureError) as caught:
        StepCapture(Model(LINEAR)).capture((X,), {}, NO_TARGET, loss_fn)
    assert str(caught.value) == place(loss_fn) + message


def test_no_loss():
    with pytest.raises(CaptureError) as caught:
        StepCapture(Model(LINEAR)).capture((X,), {})
    assert str(caught.value) == place(LINEAR) + (
        "Model returns f32[b, 3], which is neither one number nor one for each sample; pass loss_fn=, a function of "
        "the output and the target, or let the model return its loss as `.loss`"
    )


def test_a_submodule_kept_whole_that_goes_through_samples():
    class Repeats(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Model(lambda self, x: x * 1 if x.sum() > 0 * self.fc.weight.sum() else x * 2)

        def forward(self, x):
            for _ in range(x.shape[0]):
                x = self.part(x)
            return x

    with pytest.raises(CaptureError) as caught:
        CallCapture(Repeats()).capture((X,), {})
    said = " ".join(str(caught.value).split())
    assert said.count("part is kept whole") == 1  # its function, `body`, was tried before
    assert "call it once, with all" in said
    assert "CaptureError" not in said


def test_what_is_no_argument_and_varies_in_size():
    model = Model(lambda self, x: x + self.cache.sum(0))
    call_capture = CallCapture(model)
    call_capture.capture((X,), {})
    model.cache = torch.ones(7, 3)
    with pytest.raises(CaptureError) as caught:
        call_capture.capture((X,), {})
    assert str(caught.value) == (
        "self.cache has another size in dimension 0 than in an earlier call, and only arguments may vary in size; "
        "pass it to forward as an argument"
    )
