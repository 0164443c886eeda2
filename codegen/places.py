"""Where each value is while a micro-batch is under way, what it is called there, and who uses it last.

    skip    made on cuda:0, used by stage 2 on cuda:1    m[i].skip, on cuda:0 and then on cuda:1
    mask    on cuda:0 and on cuda:1, used on both        m[i].mask and m[i].mask_on_cuda1

A value that leaves its device for good keeps its name. CPU workers share one memory, so between them nothing moves.
"""

from __future__ import annotations

from collections.abc import Collection

from fxpipe.codegen.names import identifier
from fxpipe.ir.program import Program
from fxpipe.ir.types import TensorType


class Places:
    """The places of a program's values. The caller is stage -1 for inputs."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.outputs = {output.value for output in program.graph.outputs}
        self.sources: dict[tuple[str, int], int] = {(m.value, m.target): m.source for m in program.moves}
        self._homes: dict[str, int] = {}
        self._names: dict[str, str] = {}
        for value, source in [(m.value, m.source) for m in program.moves] + [(s.name, -1) for s in program.graph.sizes]:
            self._homes[value] = min(source, self._homes.get(value, source))
            if value not in self._names:
                self._names[value] = unused(identifier(value), self._names.values())

    def name(self, value: str) -> str:
        """The attribute that holds the value where it is made."""
        return self._names[value]

    def at(self, value: str, stage: int) -> str:
        """The expression for the value of micro-batch i where the stage runs."""
        device = self.device(value, stage)
        if device == self.device(value, self._homes[value]) or self._leaves(value):
            return f"m[i].{self._names[value]}"
        return f"m[i].{self._names[value]}_on_{device.replace(':', '')}"

    def device(self, value: str, stage: int) -> str:
        """The torch device of the value where the stage runs. A number is everywhere."""
        kind = self.program.types[value]
        if not isinstance(kind, TensorType):
            return "cpu"
        return torch_device(kind.device if stage < 0 else self.program.stages[stage].device)

    def arrives(self, value: str, stage: int) -> bool:
        """Whether the value comes to the stage's device with this stage: it comes once to each device."""
        source = self.sources.get((value, stage), -1)
        device = self.device(value, stage)
        earlier = (user for user in self._users(value) if user < stage)
        return device != self.device(value, source) and all(self.device(value, user) != device for user in earlier)

    def leaves(self, value: str, stage: int) -> bool:
        """Whether the value goes from the stage to another device."""
        return any(
            self.arrives(value, user) for user in self._users(value) if self.sources.get((value, user)) == stage
        )

    def done(self, value: str, stage: int) -> bool:
        """Whether nobody needs the value any more, in this place, when the stage has run."""
        at_home = self.at(value, stage) == f"m[i].{self._names[value]}"
        if value in self.outputs and at_home:
            return False
        later = [user for user in self._users(value) if user > stage]
        reads = [source for user in later if self.arrives(value, user) and (source := self.sources[value, user]) >= -1]
        here = self.at(value, stage)
        return all(self.at(value, user) != here for user in later) and all(self.at(value, r) != here for r in reads)

    def _leaves(self, value: str) -> bool:
        """Whether all its users are on one device, and nobody at home needs it."""
        return value not in self.outputs and len({self.device(value, user) for user in self._users(value)}) == 1

    def _users(self, value: str) -> list[int]:
        return [stage.index for stage in self.program.stages if value in stage.takes]


def torch_device(label: str) -> str:
    """The torch device of a worker label.

    >>> torch_device("cpu:1"), torch_device("cuda:1"), torch_device("cuda")
    ('cpu', 'cuda:1', 'cuda:0')
    """
    kind, _, index = label.partition(":")
    return "cpu" if kind == "cpu" else f"{kind}:{index or 0}"


def unused(name: str, taken: Collection[str]) -> str:
    """The name, with as many underscores behind it as it takes to be new."""
    while name in taken:
        name += "_"
    return name
