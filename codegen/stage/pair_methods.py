"""The methods of a stage for overlapped pairs: its forward runs beside the backward of a stage on the same device.

    def forward_beside_backward_2(self, other: Stage, x: Tensor, kept: list[Any], dy: Tensor) -> ...:
        h, y = kept
        kept.clear()

        # i: model.py:20  x = self.attention(x)
        ...

        # j: gradient of model.py:31  return self.head(x)
        ...

It is the text of both, in groups that come from one line of the user's each. The groups take turns, so that of both
about the same share is done at any point: while the values that a group sends are on their way, as in a stage with
tensor or expert parallelism, the other micro-batch computes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, zip_longest

from fxpipe.codegen.stage.backward_methods import Maker, forward_result, forward_stage
from fxpipe.codegen.stage.forward_signature import arguments, results
from fxpipe.codegen.stage.stage_body import GRADIENT_OF, body
from fxpipe.codegen.stage.stage_constants import state_paths
from fxpipe.codegen.stage.variables import assign
from fxpipe.codegen.text.line_layout import Brackets
from fxpipe.codegen.text.statements import BLANK, Block, Delete, Statement, apart, text_of
from fxpipe.ir.program.program import Program, Stage

Group = Sequence[Statement]
HEAVY = re.compile(r"\b(?:linear|mm|bmm|addmm|baddbmm|matmul|einsum|conv\w*|\w*attention\w*)(?:\.\w+)?\(| @ ")
FEWEST_GROUPS = 4  # of a forward or backward
HEAVY_COST = 10  # of such an op; others count 1 a line


def pair_methods(program: Program, stage: Stage, taken: Collection[str], beside: Sequence[Stage]) -> Iterator[Block]:
    """A method for each stage whose backward runs beside the forward of `stage`. `taken`: names that the file uses."""
    for partner in beside:
        yield _pair_method(program, stage, {*taken, "other", "kept", "sums"}, partner)


def _pair_method(program: Program, stage: Stage, taken: Collection[str], partner: Stage) -> Block:
    wider = forward_stage(stage)
    variables = assign(wider, program.types, state_paths(program, stage), taken, wider.gives[len(stage.gives) :])
    is_other, states = partner.index != stage.index, state_paths(program, partner)
    if is_other:
        states = {name: f"other{text.removeprefix('self')}" for name, text in states.items()}
    backward = Maker(program, partner, states, {*taken, *variables.names}).whole(f"j: {GRADIENT_OF}")
    returned = forward_result(stage, variables)
    assert returned is not None
    *forward, _ = body(program, wider, variables, returns=returned, about="i: ", taken={*taken, *backward.names})
    others = ["other: Stage"] if is_other else []
    head = Brackets(
        f"def forward_beside_backward_{partner.index}(",
        ("self", *others, *arguments(program, stage, variables), *backward.arguments),
        f") -> {results(program, stage, more=3)}:",
    )
    about = f'"""Forward of micro-batch i, beside the backward of stage {partner.index} on micro-batch j."""'
    merged = apart([backward.unpack, *_merged(_groups(forward), _groups(backward.statements))])
    return Block(head, (about, *merged, BLANK, Brackets("return ", (*returned.items, *backward.lists), "", "bare")))


def _groups(statements: Sequence[Statement]) -> list[Group]:
    """The statements, cut where there is an empty line: before each line of the user's. What is most of the work, such
    as a loop over layers in one line, is cut further."""
    groups = [list(group) for blank, group in groupby(statements, lambda one: one is BLANK) if not blank]
    most = sum(map(_cost, groups)) / FEWEST_GROUPS
    return [piece for group in groups for piece in (_pieces(group) if _cost(group) > most else [group])]


def _pieces(group: Group) -> Iterator[Group]:
    """The group, cut behind each expensive op. Each piece has the comment of the group."""
    comment, *rest = group
    piece = [comment]
    for statement, following in zip_longest(rest, rest[1:]):
        piece.append(statement)
        if (
            HEAVY.search("\n".join(text_of([statement])))
            and following is not None
            and not isinstance(following, Delete)
        ):
            yield piece
            piece = [comment]
    yield piece


def _merged(forward: Sequence[Group], backward: Sequence[Group]) -> list[Group]:
    """All groups, those of each in their order; next comes the one of which less is done. Neighbours with the same
    comment are one group."""
    costs = [[_cost(group) for group in groups] for groups in (forward, backward)]
    done = [[sum(each[:k]) / (sum(each) or 1) for k in range(len(each))] for each in costs]
    places = [(share, which, k) for which, shares in enumerate(done) for k, share in enumerate(shares)]
    merged: list[Group] = []
    for _, which, k in sorted(places):
        comment, *rest = group = (forward, backward)[which][k]
        if merged and merged[-1][0] == comment:
            merged[-1] = [*merged[-1], *rest]
        else:
            merged.append(group)
    return merged


def _cost(group: Group) -> int:
    """An estimate of the time of a group, in ops that touch each element once."""
    code = "\n".join(line for line in text_of(group) if not line.lstrip().startswith(("#", "del ")))
    return len(group) + HEAVY_COST * len(HEAVY.findall(code))
