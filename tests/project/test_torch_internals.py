"""What is private of torch is named in one room; each file there says what for, and what is done without it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from fxpipe.torch_internals.capability import Capability, capabilities, exists

from .test_imports import files, room_of

ROOM = "torch_internals"
# What torch's objects have under such names. Those of modules are not here: they are in the file of every saved module.
OF_OBJECTS = {
    "_backward_hooks", "_base", "_boxed_call", "_cdata", "_current_autograd_node", "_execution_engine",
    "_get_sequence_nr", "_indices", "_is_view", "_is_zerotensor", "_overloadname", "_plugins",
    "_post_accumulate_grad_hooks", "_saved_tensors", "_schema", "_sequence_nr", "_start_coalescing", "_version",
    "_world",
}  # fmt: skip


def is_private(name: str) -> bool:
    """Whether a full name of torch's is none that torch promises."""
    parts = name.split(".")
    hidden = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return parts[0] == "torch" and (hidden or name.startswith("torch.fx.experimental"))


def names(text: str) -> Iterator[str]:
    """The full names of torch's that a file imports or reads, by whatever name it has imported their modules; and its
    attributes of anything."""
    tree, known = ast.parse(text), {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    known[alias.asname] = alias.name
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
            parts, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in known:
                yield ".".join([known[inner.id], *reversed(parts)])


@pytest.mark.parametrize("module", [module for module in sorted(files()) if room_of(module) != ROOM])
def test_no_other_room_names_what_is_private_of_torch(module: str) -> None:
    found = {name for name in names(files()[module].read_text()) if is_private(name) or name in OF_OBJECTS}
    assert not found, f"{sorted(found)} belong in a file of fxpipe/torch_internals"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch\ntorch._C._nn.pad(x)", "torch._C._nn.pad"),
        ("import torch.distributed as dist\ndist._reduce(x)", "torch.distributed._reduce"),
        ("from torch import distributed as d\nd.c10d._world", "torch.distributed.c10d._world"),
        ("from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("import torch.fx.experimental.symbolic_shapes", "torch.fx.experimental.symbolic_shapes"),
    ],
)
def test_the_rule_sees_names(text: str, found: str) -> None:
    assert found in set(filter(is_private, names(text)))


def test_the_rule_lets_public_names_be() -> None:
    text = "import torch\nfrom torch import nn\ntorch.__version__, nn.Linear, self._own, torch.autograd.graph.Node"
    assert not set(filter(is_private, names(text)))


@pytest.mark.parametrize("capability", capabilities(), ids=lambda capability: capability.what)
def test_each_capability_is_there_and_says_what_is_done_without(capability: Capability) -> None:
    assert capability.there
    assert capability.without
    assert not exists("torch.nothing_of_this_name")
    assert Capability("x", (*capability.names, "torch.nothing_of_this_name"), "", "").there is False


def room() -> dict[str, str]:
    """The texts of the files that have capabilities, by module."""
    found = {module: path.read_text() for module, path in files().items() if room_of(module) == ROOM}
    return {
        module: text
        for module, text in found.items()
        if not module.endswith((".capability", ".patched", "_internals", "ing"))
    }


def test_no_new_names() -> None:
    """It only goes down."""
    texts = [path.read_text() for module, path in files().items() if room_of(module) == ROOM]
    found = {name for text in texts for name in names(text) if is_private(name)}
    whole = {name for name in found if not any(other.startswith(f"{name}.") for other in found)}
    assert len(whole) <= 96


@pytest.mark.parametrize("module", room())
def test_each_file_of_the_room_says_what_it_uses(module: str) -> None:
    assert "Capability(" in room()[module]
