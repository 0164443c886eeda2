"""Hooks that append what they see to a list of the user's."""

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.capture.twins.hook_lists import only_appends
from fxpipe.errors import CaptureError

CHUNKS = 2


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh()).double()


def looking(model):
    """The lists that hooks on the model append to."""
    outputs, inputs, means, factors = [], [], [], [2.0]
    model[1].register_forward_hook(lambda module, args, y: outputs.append(y))
    model[2].register_forward_pre_hook(lambda module, args: inputs.extend(args))

    def look(module, args, y):
        outputs.append(y)
        means.append((module.weight.detach() * factors[0], y.detach().mean(-1), "mean"))

    model[2].register_forward_hook(look)
    return outputs, inputs, means


def test_a_hook_that_appends_sees_the_values_of_the_whole_batch():
    """As many items for each call as in the plain model, and no new capture."""
    model, twin, x = made(), made(), torch.randn(6, 4, dtype=torch.float64)
    wanted, found = looking(model), looking(twin)
    pipe = fxpipe.compile(twin, devices=2, chunks=CHUNKS)
    for calls in (1, 2, 3):
        model(x).sum().backward()
        pipe(x).sum().backward()
        assert [len(seen) for seen in found] == [2 * calls, calls, calls]
        torch.testing.assert_close(found[:2], wanted[:2])
        for one, other in zip(found[2], wanted[2], strict=True):
            torch.testing.assert_close(one[:2], other[:2])
            assert one[2] == other[2]
        assert found[0][0].requires_grad
    assert len(pipe._state.cache.builds) == 1
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad)
    pipe.close()


def test_what_a_hook_has_seen_may_be_in_the_loss():
    model, twin, x = made(), made(), torch.randn(6, 4, dtype=torch.float64)
    for one in (model, twin):
        outputs, *_ = looking(one)
        run = fxpipe.compile(one, devices=2, chunks=CHUNKS) if one is twin else one
        (run(x).sum() + outputs[0].square().sum()).backward()
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad)
    run.close()


def test_hooks_append_in_steps_too():
    twin, x = made(), torch.randn(6, 4, dtype=torch.float64)
    outputs, inputs, _ = looking(twin)
    pipe = fxpipe.compile(twin, devices=2, chunks=CHUNKS)
    for calls in (1, 2):
        pipe.step(x, loss_fn=lambda y: y.sum())
        assert (len(outputs), len(inputs)) == (2 * calls, calls)
    torch.testing.assert_close(outputs[0], torch.relu(twin[0](x)))
    assert not outputs[0].requires_grad
    pipe.close()


def test_a_capture_appends_nothing():
    twin, x = made(), torch.randn(6, 4, dtype=torch.float64)
    lists = looking(twin)
    pipe = fxpipe.compile(twin, devices=2, chunks=CHUNKS, example_inputs=x)
    assert lists == ([], [], [])
    pipe(x)
    assert [len(seen) for seen in lists] == [2, 1, 1]
    pipe.close()


def test_a_hook_that_does_more_with_its_list_is_refused():
    model, seen = made(), []

    def look(module, args, y):
        if len(seen) < 100:
            seen.append(y)

    model[1].register_forward_hook(look)
    pipe = fxpipe.compile(model, devices=2, chunks=CHUNKS)
    with pytest.raises(CaptureError, match="does it append to a list"):
        pipe(torch.randn(6, 4, dtype=torch.float64))
    pipe.close()


def test_what_appending_is():
    a, b, c, d = [], [], [], []

    def look(y):
        a.append(y)
        b.extend([y, c[0]])
        return [d for _ in range(3)]

    assert [only_appends(look.__code__, name) for name in ("a", "b", "c", "d", "y")] == [
        True,
        True,
        False,
        False,
        False,
    ]
