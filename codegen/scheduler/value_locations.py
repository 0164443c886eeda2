"""Where each value of a micro-batch is, its name there, and which stage uses it last.

    skip    made on cuda:0, used by stage 2 on cuda:1    m[i].skip, on cuda:0 and then on cuda:1
    mask    on cuda:0 and on cuda:1, used on both        m[i].mask and m[i].mask_on_cuda1

A value that leaves its device for good keeps its name. CPU workers share one memory, so between them nothing moves. The
device of the caller's batch is not known: if a stage is on the CPU, the batch is copied there first; else GPUs copy it
from its device.
"""

from __future__ import annotations

from collections.abc import Iterable

from fxpipe.codegen.text.source_names import identifier
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.program.program import Loan, Program, Stage


class Places:
    """The places of a program's values. A place is the expression that holds a value of micro-batch i on a device; the
    caller, from whom inputs come, is stage -1."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.outputs = {output.value for output in program.graph.outputs}
        self.sources = {(move.value, move.target): move.source for move in program.moves}
        given = [item.name for item in program.graph.inputs] + [size.name for size in program.graph.sizes]
        if program.graph.epilogue is not None:
            given += [output.value for output in program.graph.epilogue.outputs]
        self._homes = dict.fromkeys(given, -1)
        for move in program.moves:
            for value in (move.given, move.value):
                self._homes[value] = min(move.source, self._homes.get(value, move.source))
        self._names = attributes(self._homes)
        self._lent = attributes(state.name for state in program.graph.states)
        self._takers: dict[str, list[int]] = {}
        for stage in program.stages:
            for value in stage.takes:
                self._takers.setdefault(value, []).append(stage.index)

    def name(self, value: str) -> str:
        """The attribute that holds the value where it is made."""
        return self._names[value]

    def lent(self, loan: Loan) -> str:
        """The attribute of `m.lent` that holds the tensor for its user."""
        return f"{self._lent[loan.state]}_for_{loan.user}"

    def borrowed(self, stage: Stage) -> tuple[str, ...]:
        """The expressions for what the stage borrows."""
        loans = {loan.state: loan for loan in self.program.borrowing[stage.index]}
        return tuple(f"m.lent.{self.lent(loans[name])}" for name in stage.borrows)

    def home(self, value: str) -> int:
        """The stage that makes the value."""
        return self._homes[value]

    def at(self, value: str, stage: int, i: str = "i") -> str:
        """The value's place for a stage, in micro-batch `i`."""
        device = self._device(value, stage)
        if device == self._device(value, self._homes[value]) or self._leaves_for_good(value):
            return f"m[{i}].{self._names[value]}"
        return f"m[{i}].{self._names[value]}{on_device(device)}"

    def arrives(self, value: str, stage: int) -> bool:
        """Whether the value is copied for this stage: it comes once to each device."""
        device = self._device(value, stage)
        earlier = (user for user in self._users(value) if user < stage)
        comes = device != self._device(value, self.sources.get((value, stage), -1))
        return comes and all(self._device(value, user) != device for user in earlier)

    def leaves(self, value: str, stage: int) -> bool:
        """Whether the value is copied from this stage to another device."""
        users = (user for user in self._users(value) if self.sources.get((value, user)) == stage)
        return any(self.arrives(value, user) for user in users)

    def done(self, value: str, stage: int) -> bool:
        """Whether the stage, once it has run, is the last that needs the value in its place."""
        return self._last_use(value, self.at(value, stage)) == (stage, "run")

    def done_by_copy(self, value: str, source: int, stage: int) -> bool:
        """Whether the copy for the stage is the last that needs the value in the source's place."""
        return self._last_use(value, self.at(value, source)) == (stage, "copy")

    def _last_use(self, value: str, place: str) -> tuple[int, str]:
        """The stage that uses the place last, and how: "copy", then "run"; or "caller" for an output."""
        uses = [(user, "run") for user in self._users(value) if self.at(value, user) == place]
        for user in self._users(value):
            source = self.sources.get((value, user), -1)
            if self.arrives(value, user) and place == self.at(value, source) != self.at(value, user):
                uses.append((user, "copy"))
        if value in self.outputs and place == self.at(value, self._homes[value]):
            uses.append((len(self.program.stages), "caller"))
        return max(uses, default=(-1, "caller"))

    def _device(self, value: str, stage: int) -> str:
        """The torch device of the value for the stage. A number is everywhere."""
        kind = self.program.types.get(value)
        if not isinstance(kind, TensorType):
            return "cpu"
        if stage >= 0:
            return torch_device(self.program.stages[stage].device)
        return "cpu" if "cpu" in map(torch_device, self.program.devices) else "anywhere"

    def _leaves_for_good(self, value: str) -> bool:
        """Whether all its users are on one device, and nobody at home needs it."""
        return value not in self.outputs and len({self._device(value, user) for user in self._users(value)}) == 1

    def _users(self, value: str) -> list[int]:
        return self._takers.get(value, [])


def torch_device(label: str) -> str:
    """The torch device of a worker label.

    >>> torch_device("cpu:1"), torch_device("cuda:1"), torch_device("cuda")
    ('cpu', 'cuda:1', 'cuda:0')
    """
    kind, _, index = label.partition(":")
    return "cpu" if kind == "cpu" else f"{kind}:{index or 0}"


def on_device(device: str) -> str:
    """The end of a name, for what is on a device: `_on_cuda1`."""
    return f"_on_{identifier(device.replace(':', ''))}"


def attributes(names: Iterable[str]) -> dict[str, str]:
    """An attribute for each name: its own, with as many underscores behind it as it takes to be new."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        attribute = identifier(name)
        while attribute in taken:
            attribute += "_"
        taken.add(attribute)
        found[name] = attribute
    return found
