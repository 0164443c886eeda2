"""A random model as source text, from a list of pieces: `drawn(seed)` is a recipe, `render(recipe)` its text.

Each piece is rendered with random numbers of its own, so that a recipe with some pieces left out is still a model, much
like the one it came from: that is how a model that fails is made smaller.

The module has `Random`, the model; `make_inputs(batch)`, its arguments; `make_target(batch)` and `loss_fn`; and
`FLAGS`, what is special about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from string import Template
from textwrap import indent

from .forms import FORMS, INPUTS, LOSSES, Form
from .pieces import ARITHMETIC, COMPLEX, INDEXING, LAYERS, Piece
from .pieces_python import CONTROL, IN_PLACE
from .pieces_state import FUNCTIONS, OPAQUES, RANDOMS, SEQUENCES, STATE

KINDS: Mapping[str, Mapping[str, Piece]] = {
    "layers": LAYERS, "arithmetic": ARITHMETIC, "indexing": INDEXING, "complex": COMPLEX, "control": CONTROL,
    "in place": IN_PLACE, "functions": FUNCTIONS, "sequences": SEQUENCES,
    "state": STATE, "random": RANDOMS, "opaque": OPAQUES,
}  # fmt: skip
SELDOM = {"state": 0.45, "random": 0.4, "opaque": 0.3}  # kinds that only some of the models have: how many
PIECES = {name: piece for kind in KINDS.values() for name, piece in kind.items()}
WIDTHS = (4, 6, 8)
ACTIVATIONS = ("relu", "gelu", "silu", "softplus", "elu", "mish", "hardtanh", "logsigmoid", "tanh", "selu", "softsign")
HEAD = '''\
"""{title}"""

import functools
import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FUSE = {{"left": 0}}  # a fault may be set here, in so many calls of `burn`


def burn():
    if FUSE["left"] > 0:
        FUSE["left"] -= 1
        if FUSE["left"] == 0:
            raise RuntimeError("burnt")
'''


@dataclass(frozen=True)
class Recipe:
    """The pieces, each with the seed of its random numbers; how the outputs are put together; the loss of a step."""

    pieces: tuple[tuple[str, int], ...]
    form: str = "tensor"
    loss: str = "total"
    seed: int = 0


@dataclass
class Draft:
    """A model that grows: its lines, and the values that later pieces may read, with their widths."""

    init: list[str] = field(default_factory=list)
    forward: list[str] = field(default_factory=list)
    top: dict[str, None] = field(default_factory=dict)
    vectors: dict[str, int] = field(default_factory=lambda: {"x": 8})
    sequences: dict[str, int] = field(default_factory=dict)
    needs: dict[str, None] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    random: list[str] = field(default_factory=list)  # values that depend on random numbers


def drawn(seed: int) -> Recipe:
    """A recipe of 3 to 16 pieces."""
    rng = Random(seed)
    kinds = [kind for kind in KINDS if rng.random() < SELDOM.get(kind, 1.0)]
    mixes = rng.random() < 0.5
    names = []
    for _ in range(rng.randint(3, 16)):
        pool = KINDS[rng.choice(kinds)]
        names.append(rng.choice([name for name, piece in pool.items() if mixes or "mixes" not in piece.flags]))
    pieces = tuple((name, rng.randrange(1 << 30)) for name in names)
    return Recipe(
        pieces, rng.choice(list(FORMS)), rng.choice([name for name in LOSSES if name != "own"]), rng.randrange(1 << 30)
    )


def render(recipe: Recipe, title: str = "A random model.") -> str:
    draft = Draft()
    for index, (name, seed) in enumerate(recipe.pieces):
        add(draft, PIECES[name], index, Random(seed), name)
    rng = Random(recipe.seed)
    form = FORMS[recipe.form]
    values = outputs(draft, form, rng)
    arguments = signature(draft, rng)
    loss = LOSSES[recipe.loss] if not form.own_loss else LOSSES["own"]
    draft.flags |= {"own loss"} if form.own_loss else set()
    parts = [
        HEAD.format(title=title),
        f"FLAGS = {sorted(draft.flags)!r}\n\n",
        *(
            f"{text}\n\n"
            for text in dict.fromkeys([*draft.top, *form.top, *(INPUTS[n].top for n in draft.needs)])
            if text
        ),
        "class Random(nn.Module):\n    def __init__(self):\n        super().__init__()",
        indent("\n".join(draft.init), "        ") + "\n",
        f"    def forward({arguments}):",
        indent("\n".join(draft.forward), "        ") + "\n\n",
        inputs_text(draft, rng) + "\n\n",
        loss.text(values) + "\n",
    ]
    return "\n".join(parts)


def add(draft: Draft, piece: Piece, index: int, rng: Random, name: str) -> None:
    """The piece's lines, with values for its holes."""
    holes = {"o": f"v{index}", "m": f"m{index}", "v": str(rng.choice(WIDTHS)), "n": str(rng.randint(1, 3))}
    holes |= {"c": repr(round(rng.uniform(-0.8, 0.9), 2)), "act": rng.choice(ACTIVATIONS), "w": "8", "half": "4"}
    if piece.takes:
        kind = draft.sequences if piece.takes[0] == "s" else draft.vectors
        if not kind:
            x = recent(draft.vectors, rng)
            draft.forward.append(f"q{index} = {x}.unsqueeze(1).repeat(1, 5, 1)")
            kind[f"q{index}"] = draft.vectors[x]
        choices = {key: width for key, width in kind.items() if not piece.risky or key[0] in "vq"}
        if not choices:
            return
        x = recent(choices, rng)
        peers = [other for other, width in kind.items() if width == kind[x] and (not piece.risky or other != x)]
        if not peers:
            return
        holes |= {"x": x, "y": rng.choice(peers), "w": str(kind[x]), "half": str(kind[x] // 2)}
    if piece.needs:
        draft.needs[piece.needs] = None
    draft.init += filled(piece.init, holes)
    draft.forward += [f"# {name}", *filled(piece.forward, holes)]
    if piece.top:
        draft.top[piece.top] = None
    draft.flags |= piece.flags | ({"risky"} if piece.risky else set())
    if piece.gives and "random" in piece.flags:
        draft.random.append(holes["o"])
    if piece.gives:
        width = int(Template(piece.width).substitute(holes))
        (draft.sequences if piece.gives == "s" else draft.vectors)[holes["o"]] = width


def filled(text: str, holes: Mapping[str, str]) -> list[str]:
    return [
        Template(line.replace("$m_", "${m}_").replace("$o_", "${o}_")).substitute(holes) for line in text.splitlines()
    ]


def recent(values: Mapping[str, int], rng: Random) -> str:
    """One of the values, rather one of the last."""
    names = list(values)
    return names[-1 - min(int(rng.expovariate(0.6)), len(names) - 1)]


def outputs(draft: Draft, form: Form, rng: Random) -> list[str]:
    """Writes the end of forward: a head that can be trained, and what is returned. Returns how a loss reads the values,
    that of the head first."""
    last = list(draft.vectors)[-1]
    draft.init.append(f"self.head = nn.Linear({draft.vectors[last]}, 3)")
    draft.forward.append(f"head = self.head({last})")
    if draft.sequences and rng.random() < 0.8:
        last_sequence = list(draft.sequences)[-1]
        draft.forward.append(f"head = head + {last_sequence}.mean((1, 2)).unsqueeze(-1)")
    # A value that nobody reads is not captured, and the draws after it would be others than the plain model's.
    draft.forward += [f"head = head + 0 * {name}.flatten(1).sum(1, keepdim=True)" for name in draft.random]
    pool = [name for name in (*draft.vectors, *draft.sequences) if name != "x"]
    chosen = [rng.choice(pool) for _ in range(rng.randint(1, 3))] if pool and form.several else []
    names = ["head", *dict.fromkeys(chosen)]
    draft.forward.append(f"return {form.text(names)}")
    return form.reads(len(names))


def signature(draft: Draft, rng: Random) -> str:
    words = [
        f"{name}={INPUTS[name].default}" if INPUTS[name].default else name
        for name in sorted(draft.needs, key=by_default)
    ]
    star = ["*"] if words and keywords(draft, rng) else []
    return ", ".join(["self", "x", *star, *words])


def by_default(name: str) -> tuple[bool, str]:
    return bool(INPUTS[name].default), name


def keywords(draft: Draft, rng: Random) -> bool:
    """Whether all inputs but the first are passed by name: once for the signature, once for the call."""
    return Random(f"{len(draft.init)} {sorted(draft.needs)}").random() < 0.5


def inputs_text(draft: Draft, rng: Random) -> str:
    grad = rng.random() < 0.7
    lines = ["def make_inputs(batch):"]
    lines.append(f"    x = torch.randn(batch, 8, dtype=torch.float64{', requires_grad=True' if grad else ''})")
    others = []
    for name in sorted(draft.needs, key=by_default):
        lines.append(f"    {name} = {INPUTS[name].made}")
        others.append(name)
    if keywords(draft, rng):
        lines.append(f"    return (x,), {{{', '.join(f'{name!r}: {name}' for name in others)}}}")
    else:
        lines.append(f"    return ({', '.join(['x', *others])},), {{}}")
    return "\n".join(lines)
