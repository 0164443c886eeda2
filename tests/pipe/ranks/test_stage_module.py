"""A part of a model is a module with the model's own names, and passes gradients on that somebody else has computed."""

from __future__ import annotations

import torch
from torch import nn

from fxpipe.pipe.ranks.stage_module import Part, add_through


def ids(*tensors: torch.Tensor) -> set[int]:
    return {id(tensor) for tensor in tensors}


def test_what_is_in_a_part() -> None:
    """The second linear, and the buffers of the norm; a hook stays behind."""
    model = nn.ModuleDict(
        {"layers": nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)), "norm": nn.BatchNorm1d(1)}
    )
    second, norm = model["layers"][2], model["norm"]
    second.register_forward_hook(lambda *_: None)
    part = Part(model, ids(*second.parameters(), *norm.buffers()))
    assert [name for name, _ in part.named_parameters()] == ["layers.2.weight", "layers.2.bias"]
    assert [name for name, _ in part.named_buffers()] == [f"norm.{name}" for name, _ in norm.named_buffers()]
    taken = part.get_submodule("layers.2")
    assert isinstance(taken, nn.Linear)
    assert taken.weight is second.weight
    assert taken.in_features == 2
    assert not taken._forward_hooks
    taken.weight = nn.Parameter(torch.zeros(1, 2))
    assert taken.weight is not second.weight


def test_a_layer_without_bias_has_none_in_the_part() -> None:
    layer = nn.Linear(2, 2, bias=False)
    taken = Part(nn.Sequential(layer), ids(layer.weight)).get_submodule("0")
    assert taken.bias is None
    assert repr(taken) == repr(layer)


def test_a_module_at_two_places_is_one() -> None:
    layer = nn.Linear(2, 2)
    part = Part(nn.Sequential(layer, nn.ReLU(), layer), ids(*layer.parameters()))
    assert part.get_submodule("0") is part.get_submodule("2")


def test_gradients_go_through() -> None:
    """Hooks see each once; a second step adds to the first; a parameter without one has none."""
    layer = nn.Linear(2, 1)
    part, seen = Part(layer, ids(*layer.parameters())), []
    layer.weight.register_hook(seen.append)
    grad = torch.tensor([[1.0, 2.0]])
    for _ in range(2):
        add_through(part, part, [(layer.weight, grad)])
    assert len(seen) == 2
    torch.testing.assert_close(layer.weight.grad, 2 * grad)
    assert layer.bias.grad is None
    add_through(part, part, [])


def test_gradients_are_not_copied() -> None:
    layer = nn.Linear(2, 1, bias=False)
    graded = [(layer.weight, torch.tensor([[1.0, 2.0]]))]
    memory = graded[0][1].data_ptr()
    part = Part(layer, ids(layer.weight))
    add_through(part, part, graded)
    assert layer.weight.grad is not None
    assert layer.weight.grad.data_ptr() == memory
    assert not graded
