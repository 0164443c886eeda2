"""Transforms and passes as a user writes them, through calls, steps and saved packages.

Two worked examples: `fuse_attention` puts torch's own attention in place of one that is written out, and
`quantise_head` rounds the weights of one layer to 8 bits, with the gradient of the rounding left out.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.ir.program.program import Program
from fxpipe.passes import PassContext


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        return x + torch.softmax(q @ k.transpose(-2, -1) / 8**0.5, dim=-1) @ v


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(), Attention()
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.second(torch.tanh(self.first(x)))))


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / 8**0.5, dim=-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def fuse_attention(module: fx.GraphModule) -> fx.GraphModule:
    assert len(fx.replace_pattern(module, written_out, fused)) == 2
    return module


def rounded(weight: Tensor) -> Tensor:
    """The weight in 255 steps for each row; its gradient is that of the weight."""
    step = weight.detach().abs().amax(dim=1, keepdim=True) / 127
    return weight + (torch.round(weight / step) * step - weight).detach()


def quantise_head(module: fx.GraphModule) -> fx.GraphModule:
    for node in module.graph.find_nodes(op="call_function", target=F.linear):
        x, weight, *bias = node.args
        if isinstance(weight, fx.Node) and weight.target == "head.weight":
            with module.graph.inserting_before(node):
                node.args = (x, module.graph.call_function(rounded, (weight,)), *bias)
    return module


def without_tanh(program: Program, context: PassContext) -> Program:
    """Leaves out every tanh: to be seen in what comes out."""

    def change(op: Any) -> Any:
        return replace(op, target=torch.clone) if op.target is torch.tanh else op

    return replace(program, stages=tuple(replace(s, ops=tuple(map(change, s.ops))) for s in program.stages))


def make() -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    return Net().double(), torch.randn(8, 5, 8, dtype=torch.float64), torch.randint(0, 3, (8, 5))


def loss(y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), target.flatten())


def quantised(model: Net) -> Net:
    """What `quantise_head` makes of the model, by hand."""
    found = copy.deepcopy(model)
    found.head.forward = lambda x: F.linear(x, rounded(found.head.weight), found.head.bias)  # type: ignore[method-assign]
    return found


def assert_gradients(pipe: nn.Module, plain: nn.Module) -> None:
    wanted = dict(plain.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, wanted[name].grad, msg=name)


OPTIONS: dict[str, Any] = {"devices": 2, "chunks": 4, "transforms": [fuse_attention, quantise_head]}


def test_steps_and_saved_packages(tmp_path: Path) -> None:
    model, x, target = make()
    plain = quantised(model)
    wanted = plain(x)
    loss(wanted, target).backward()
    pipe = fxpipe.compile(model, schedule="1f1b", backward="autograd", **OPTIONS)
    got = pipe.step(x, target=target, loss_fn=loss, outputs=True)
    torch.testing.assert_close(got[1], wanted.detach())
    assert_gradients(pipe, plain)
    text = "".join(pipe.files.values())
    assert text.count("F.scaled_dot_product_attention(") == 2
    assert text.count("test_open_compiler.rounded(") == 1
    attention = next(op for op in pipe.build.graph.ops if op.target is F.scaled_dot_product_attention)
    assert (attention.origin.module, "def fuse_attention" in attention.origin.code) == ("first", True)
    pipe.save(tmp_path / "out")
    pipe.zero_grad()
    loaded = fxpipe.load(tmp_path / "out", model)
    torch.testing.assert_close(loaded.step(x, target=target, loss_fn=loss, outputs=True)[1], wanted.detach())
    assert_gradients(loaded, plain)
    loaded.close()
    torch.testing.assert_close(pipe.graph_module(x, target)[0], loss(wanted, target))
    pipe.close()


def test_calls() -> None:
    """And the GraphModules: that of the graph on the batch, those of the stages one after the other."""
    model, x, _ = make()
    plain = quantised(model)
    wanted = plain(x)
    wanted.square().mean().backward()
    pipe = fxpipe.compile(model, **OPTIONS)
    pipe(x).square().mean().backward()
    assert_gradients(pipe, plain)
    assert isinstance(pipe.graph_module, fx.GraphModule)
    assert pipe.graph_module.get_parameter("head.weight") is model.head.weight
    torch.testing.assert_close(pipe.graph_module(x), wanted)
    value = (x,)
    for stage in pipe.stage_modules:
        value = stage(*value)
    torch.testing.assert_close(value[0], wanted)
    with torch.no_grad():
        torch.testing.assert_close(pipe.eval()(x), wanted)
    pipe.close()


def test_a_pass_runs_after_ours_and_is_in_the_trail() -> None:
    model, x, _ = make()
    pipe = fxpipe.compile(model, 2, 1, passes=[without_tanh])
    plain = copy.deepcopy(model)
    plain.forward = lambda x: plain.head(plain.norm(plain.second(plain.first(x))))  # type: ignore[method-assign]
    torch.testing.assert_close(pipe(x), plain(x))
    assert list(pipe.trail)[-1] == "without_tanh"
    pipe.close()


@pytest.mark.parametrize("what", ["transforms", "passes"])
def test_what_is_no_function(what: str) -> None:
    model, _, _ = make()
    with pytest.raises(fxpipe.PlanError, match=f"{what} is .*: write a list of functions"):
        fxpipe.compile(model, 2, 2, **{what: ["fuse"]})
