"""A package is refused by a model that is not the one that it was saved from, and the error names the submodule."""

import copy
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import PackageError
from fxpipe.pipe.saved.model_fingerprint import check_fits, fingerprint

SCALE = 0.5


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


class Block(nn.Module):
    def __init__(self, heads: int = 2, width: int = 6) -> None:
        super().__init__()
        self.fc, self.drop, self.heads, self.calls, self.note = nn.Linear(6, width), nn.Dropout(0.0), heads, 0, "first"
        self.config = types.SimpleNamespace(power=2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + scaled(self.drop(self.fc(x).pow(self.config.power)).tanh()) / self.share()

    def share(self) -> float:
        return self.heads + 1.0

    def unused(self) -> str:
        return self.note


class Other(Block):
    def share(self) -> float:
        return self.heads + 2.0


class Net(nn.Module):
    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        self.blocks, self.up, self.down = nn.ModuleList(kind() for _ in range(3)), nn.Linear(6, 6), nn.Linear(6, 6)
        self.up.weight = self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.relu(self.up(self.down(x)))


def act(change: Callable[[Net], object]) -> Callable[[], Net]:
    def make() -> Net:
        model = Net()
        change(model)
        return model

    return make


def same_name() -> type[Block]:
    """A class of the same name whose `share` is another function."""
    return type("Block", (Block,), {"share": lambda self: self.heads + 3.0, "__qualname__": "Block"})


HERE = r"test_model_fingerprint\.py:\d+\)"
OTHERS: dict[str, tuple[Callable[[], Net], str]] = {
    "attribute": (
        act(lambda net: setattr(net.blocks[1], "heads", 3)), rf"blocks\.1\.heads: 3, expected 2  \(Block, {HERE}",
    ),
    "attribute of a library's": (
        act(lambda net: setattr(net.blocks[2].drop, "p", 0.3)), rf"drop\.p: 0\.3, expected 0\.0  \(in Block, {HERE}",
    ),
    "attribute of an attribute": (
        act(lambda net: setattr(net.blocks[0].config, "power", 3)), rf"config\.power: 3, expected 2  \(Block, {HERE}",
    ),
    "shape": (
        act(lambda net: net.blocks.__setitem__(0, Block(width=5))),
        rf"fc\.weight: float32\[5, 6\], expected float32\[6, 6\]  \(in Block, {HERE}",
    ),
    "class": (lambda: Net(Other), rf"blocks\.0: Other, expected Block  \(Other, {HERE}"),
    "code": (lambda: Net(same_name()), r"the code of Block\.share differs: function <lambda>, expected function share"),
    "class of a library": (act(lambda net: setattr(net, "up", nn.Identity())), "up: Identity, expected Linear"),
    "one layer less": (act(lambda net: net.blocks.pop(2)), r"blocks\.2: missing  \(in Net"),
    "one layer more": (act(lambda net: net.blocks.append(Block())), r"blocks\.3: is not in the package"),
    "not tied": (
        act(lambda net: setattr(net.up, "weight", nn.Parameter(torch.ones(6, 6)))),
        r"up\.weight: float32\[6, 6\], expected not there|down\.weight: float32\[6, 6\], expected up\.weight",
    ),
    "one layer twice": (
        act(lambda net: net.blocks.__setitem__(2, net.blocks[0])), r"blocks\.2\.same as: blocks\.0, expected not there",
    ),
    "hook": (
        act(lambda net: net.down.register_forward_hook(lambda *_: None)), r"down\.hook 0: function <lambda>",
    ),
    "forward of an object": (
        act(lambda net: setattr(net.blocks[0], "forward", types.MethodType(lambda self, x: x, net.blocks[0]))),
        r"blocks\.0\.forward: method",
    ),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_is_refused_by_its_submodule(other: str) -> None:
    make, message = OTHERS[other]
    with pytest.raises(PackageError, match=rf"(?s)made for Net; this Net does not fit:.*{message}"):
        check_fits(fingerprint(Net()), make())


def test_what_forward_uses_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    known = fingerprint(Net())
    monkeypatch.setitem(globals(), "SCALE", 0.25)
    with pytest.raises(PackageError, match=r"code of Block\.forward\.scaled\.SCALE differs: 0\.25, expected 0\.5"):
        check_fits(known, Net())


def test_a_global_tensor_of_any_layout_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second number of a tensor, as `x.real` of a complex one; the same numbers without gaps are the same."""
    gaps = torch.arange(8.0)[::2]
    monkeypatch.setitem(globals(), "SCALE", gaps)
    known = fingerprint(Net())
    monkeypatch.setitem(globals(), "SCALE", gaps.clone())
    check_fits(known, Net())
    monkeypatch.setitem(globals(), "SCALE", gaps + 1)
    with pytest.raises(PackageError, match="SCALE differs"):
        check_fits(known, Net())


def test_what_decides_no_value_does_not_count() -> None:
    model = Net()
    model.blocks[0].calls, model.blocks[1].note = 7, "second"
    model.note = "more"  # type: ignore[assignment]
    check_fits(fingerprint(Net()), model.eval())
    check_fits(fingerprint(Net()), copy.deepcopy(model))
    with torch.device("meta"):
        check_fits(fingerprint(model), Net())


def test_a_package_runs_with_the_model_and_no_other(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(8, 6, dtype=torch.float64)
    pipe = fxpipe.compile(model, devices=2, chunks=4)
    pipe(x)
    pipe.save(tmp_path)
    model.blocks[1].heads = 5
    with pytest.raises(PackageError, match=r"changed since it was captured: blocks\.1\.heads: 5, expected 2"):
        pipe.save(tmp_path, overwrite=True)
    pipe.close()
    with pytest.raises(PackageError, match=r"blocks\.1\.heads: 5, expected 2"):
        fxpipe.load(tmp_path, model)
    model.blocks[1].heads = 2
    loaded = fxpipe.load(tmp_path, model)
    torch.testing.assert_close(loaded(x), model(x), rtol=1e-12, atol=1e-12)
    loaded.close()
