"""Where a torch does not have a capability, what uses it is right by another way, or refused by its name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import FxpipeError
from fxpipe.torch_internals.capability import Capability, capabilities
from fxpipe.torch_internals.compiling.stage_compiler import OFF
from tests.helpers.marks import mostly_slow, slow_in_turn
from tests.whole.ranks import without
from tests.whole.ranks.pool import Pool

ROOT = Path(__file__).parents[2]
X, Y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)
EVERY = {capability.what: capability for capability in capabilities()}
OF_RANKS = [what for what, one in EVERY.items() if any("distributed" in name for name in one.names)]


class Net(nn.Module):
    """Padding, an autocast, attention, a product whose gradient is a view, a table."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))
        self.table = nn.Parameter(torch.randn(2, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(x)) + self.table.view(6)
        x[:, :1] *= 2  # a stage with this is traced whole
        with torch.autocast("cpu", enabled=False):
            x = F.pad(self.down(x), (1, 1))[:, 1:-1]
        with torch.no_grad():
            bias = x.mean(1, keepdim=True)
        y: Tensor = self.out(torch.sigmoid(x) + bias)
        return y


WAYS: dict[str, dict[str, object]] = {
    "plain": {"schedule": "1f1b", "checkpoint": "never"},
    "recomputing": {"schedule": "gpipe", "checkpoint": "always"},
    "split": {"schedule": "zb-h1", "checkpoint": "never", "backward": "autograd"},
    "code": {"schedule": "zb-h1", "checkpoint": "never", "backward": "code"},
    "compiled": {"schedule": "1f1b", "compile_stages": "aot_eager"},
    "graph_module": {"schedule": "1f1b"},
}
# What is refused, and for whom; all else has another way.
REFUSED: dict[str, set[str]] = {
    **{what: set(WAYS) for what, one in EVERY.items() if one.needed},
    "the code that torch.compile has made of a function, with its guards": set(WAYS),
    "where a trace is, and what its guards look at": set(WAYS),
    "symbols for sizes and numbers that may vary": set(WAYS),
    "which tensors are inside of a vmap": set(WAYS),
    "run a backward without its checks": {"split"},
    "functions that enter and leave an autocast, which an fx.Graph can call": {"graph_module"},
    "symbols as sizes of tensors without memory": {"code"},
    "torch.compile, with a call of ours around each compilation": set(WAYS),
    "torch.compile of forward and backward at once": {"compiled"},
}


def expected(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    loss = F.mse_loss(model(X), Y)
    grads = torch.autograd.grad(loss, [*model.parameters()])
    return loss.detach(), dict(zip(dict(model.named_parameters()), grads, strict=True))


def check(way: str) -> None:
    """A call, two steps and what is read of a pipe are the plain model's."""
    torch.manual_seed(0)
    model = Net()
    output, (loss, grads) = model(X).detach(), expected(model)
    pipe = fxpipe.compile(model, 2, 4, **WAYS[way])
    try:
        if way == "graph_module":
            pipe(X)
            torch.testing.assert_close(pipe.graph_module(X), output)
        for count in (1, 2):
            torch.testing.assert_close(pipe.step(X, target=Y, loss_fn=F.mse_loss), loss)
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad, grads[name] * count, msg=name)
        if way == "code":
            assert any("def input_gradient" in text for text in pipe.files.values())
        torch.testing.assert_close(pipe(X).detach(), output)
        assert pipe.explain()
    finally:
        pipe.close()


@pytest.mark.parametrize("way", mostly_slow(WAYS, lambda way: way != "compiled"))
def test_with_all_of_them(way: str) -> None:
    check(way)


NOT_OF_RANKS = [what for what in EVERY if what not in OF_RANKS]
LONGER = (
    "run a backward without its checks",
    "functions that enter and leave an autocast, which an fx.Graph can call",
)


@pytest.mark.parametrize(
    "what",
    [
        *mostly_slow([what for what in NOT_OF_RANKS if what in REFUSED], lambda what: what not in LONGER),
        *slow_in_turn([what for what in NOT_OF_RANKS if what not in REFUSED], 3),
    ],
)
def test_without_one(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(EVERY[what]), "there", False)
    refused = set()
    for way in WAYS:
        try:
            check(way)
        except FxpipeError as error:
            if what not in str(error):
                raise
            refused.add(way)
    assert refused == REFUSED.get(what, set())


@pytest.mark.slow
def test_a_pipe_in_a_compiled_model_without_code_that_is_left_alone() -> None:
    """What marks it is chosen when fxpipe is imported."""
    code = f"""
        import sys, types, importlib, torch
        sys.modules["fxpipe"] = package = types.ModuleType("fxpipe")
        package.__path__ = [{str(ROOT / "fxpipe")!r}]
        capability = importlib.import_module("fxpipe.torch_internals.capability")
        made = capability.Capability.__init__
        def without(self, *args, **kwargs):
            made(self, *args, **kwargs)
            if self.what == {OFF.what!r}:
                vars(self)["there"] = False
        capability.Capability.__init__ = without
        del sys.modules["fxpipe"]
        import fxpipe
        from fxpipe.torch_internals.compiling.stage_compiler import OFF
        assert not OFF.there
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
        x = torch.randn(8, 4)
        pipe = fxpipe.compile(model, 2, 2)
        torch.testing.assert_close(torch.compile(lambda x: pipe(x) * 2, backend="eager")(x), model(x) * 2)
    """
    lines = "\n".join(line[8:] for line in code.split("\n"))
    run = subprocess.run([sys.executable, "-c", lines], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    "run",
    mostly_slow([without.over_gloo, without.like_an_accelerator], [without.over_gloo].__contains__),
    ids=lambda run: run.__name__,
)
def test_over_ranks(run: Callable[..., list[str]]) -> None:
    """All in one world of two processes, one after the other."""
    ranks = Pool(2)
    try:
        for what, told in zip(OF_RANKS, ranks.run(run, OF_RANKS, ranks=(0, 1))[0], strict=True):
            assert told in ("right", f"refused: {what}"), what
    finally:
        ranks.close()


def test_a_refusal_names_the_capability_and_the_versions() -> None:
    lost = Capability("fly", ("torch.wings._flap", "torch.wings.feather"), "2.99", "fxpipe walks")
    with pytest.raises(FxpipeError, match=r"soaring needs of torch: fly \(torch.wings._flap, .*2\.13"):
        lost.need("soaring")
