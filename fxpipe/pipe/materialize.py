"""Gives real tensors to a model on the meta device, or to the part of it that one process needs.

A model that fits on no machine is made under `torch.device("meta")`, captured and planned there. Then each stage gets
its own tensors. Their values must not depend on how the model is cut: each random op is seeded with (seed, path of the
tensor that it fills, number of earlier random ops on that tensor). So the plain model, two stages and eight stages
begin with the same values, bit for bit. Other tensors stay on the meta device, where torch's ops compute nothing.

    module by module, children first, as in `model.apply`:
      empty tensors ─▶ reset_parameters() ─▶ init(module, path) ─▶ the checkpoint ─▶ an error if a tensor is not set
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import CheckpointError, MaterializeError
from fxpipe.torch_internals.op_modes import TorchDispatchMode
from fxpipe.torch_internals.operator_classes import schema
from fxpipe.torch_internals.tensor_memory import memory_key

from .libraries.converted_checkpoint import converted
from .saved.tensor_sources import Source, based, open_source

Init = Callable[[nn.Module, str], Any]
RESETS = ("reset_parameters", "_reset_parameters")  # the second is what nn.MultiheadAttention and nn.Transformer have
MOST_FAULTS = 10


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in the model: `held[key]` of the `module` at `path`."""

    module: nn.Module
    path: str
    key: str
    held: dict[str, Tensor | None]

    @property
    def full(self) -> str:
        return f"{self.path}.{self.key}" if self.path else self.key

    @property
    def now(self) -> Tensor | None:
        return self.held[self.key]

    @property
    def saved(self) -> bool:
        """Whether `state_dict()` has the tensor."""
        return self.key not in self.module._non_persistent_buffers_set

    def __str__(self) -> str:
        kind = "parameter" if self.held is self.module._parameters else "buffer"
        return f"{self.full} ({kind} of {type(self.module).__name__})"


def materialize(
    model: nn.Module,
    seed: int = 0,
    *,
    init: Init | None = None,
    checkpoint: str | Path | None = None,
    only: Collection[str] | None = None,
) -> None:
    """Replace the model's tensors on the meta device by tensors on the CPU, with values.

    - `seed`: decides the values, together with the name of each tensor.
    - `init(module, path)`: called for each module that has tensors on the meta device, itself or in its submodules,
      after the module's own `reset_parameters()`, if it has one; children before their parents, as in `model.apply`.
    - `checkpoint`: the values by the model's own keys: a file with a `state_dict`, a `.safetensors` file, shards
      (their `.index.json`, or a folder of Hugging Face), or a folder of torch.distributed.checkpoint. Only what is
      needed is read. With the model's `base_model_prefix`, if it has one, a base model and a model with a head take
      each other's keys; a model of transformers takes those of the hub's files. Tensors that are not in
      `state_dict()` are initialised.
    - `only`: the names of the tensors to make; None: all. Tied weights are made once, if `only` has one of their names.

    Parameters become new objects: make optimizers and hooks on them afterwards. Raises MaterializeError if nothing sets
    a tensor that is to be made, CheckpointError if the checkpoint lacks it or has it in another shape; then nothing has
    changed.

    >>> import torch, fxpipe
    >>> from torch import nn
    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    >>> fxpipe.materialize(model, seed=1, only={"1.weight", "1.bias"})
    >>> model[0].weight.device.type, model[1].weight.device.type
    ('meta', 'cpu')
    """
    slots = list(slots_of(model))
    asked = {id(slot.now): slot.now for slot in slots if only is None or slot.full in only}
    fresh = {key: empty(tensor) for key, tensor in asked.items() if tensor is not None and tensor.is_meta}
    mine = [slot for slot in slots if id(slot.now) in fresh]
    before = [(slot, slot.now) for slot in slots]
    try:
        for slot in mine:
            slot.held[slot.key] = fresh[id(slot.now)]
        keys = [slot.full for slot in slots]
        source = None if checkpoint is None else converted(open_source(checkpoint), model, keys)
        if source is not None and isinstance(prefix := getattr(model, "base_model_prefix", None), str) and prefix:
            source = based(source, [slot.full for slot in mine], prefix)
        found = {} if source is None else find(mine, source)
        read = {id(tensor) for tensor in found.values()}
        with aside(slots, mine):
            initialise(model, [slot for slot in mine if id(slot.now) not in read], seed, init)
        if source is not None:
            source.fill(found)
    except BaseException:
        for slot, tensor in before:
            slot.held[slot.key] = tensor
        raise


def slots_of(model: nn.Module) -> Iterator[Slot]:
    """All places of parameters and buffers, each under the first path of its module."""
    for path, module in model.named_modules():
        held: Any
        for held in (module._parameters, module._buffers):
            yield from (Slot(module, path, key, held) for key, _ in held.items())


def empty(tensor: Tensor, device: str = "cpu") -> Tensor:
    """A tensor or parameter of the same shape and type, without values, with the attributes that the user has set."""
    made = torch.empty_like(tensor, device=device, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made


def find(slots: Sequence[Slot], source: Source) -> dict[str, Tensor]:
    """The tensors that the checkpoint has, by their keys there; one key of tied weights is enough. Raises
    CheckpointError if one is missing or has another shape."""
    found: dict[int, tuple[str, Tensor]] = {}
    for slot in slots:
        if slot.now is not None and slot.full in source.keys:
            found.setdefault(id(slot.now), (slot.full, slot.now))
    faults = [f"{slot}: missing" for slot in slots if slot.saved and id(slot.now) not in found]
    for key, tensor in found.values():
        if (saved := source.shape(key)) != tuple(tensor.shape):
            faults.append(f"{key}: {list(saved)}, and the model has {list(tensor.shape)}")
    if faults:
        raise CheckpointError(f"{source.name} does not fit the model:{listed(faults)}")
    return dict(found.values())


@contextmanager
def aside(slots: Sequence[Slot], mine: Sequence[Slot]) -> Iterator[None]:
    """A context in which initialisers, which may reach other modules, cannot change tensors that are not in `mine`:
    other modules hold copies on the meta device. In modules with a tensor of `mine`, the other tensors are copies on
    the CPU, because some of torch's initialisers, such as `orthogonal_`, draw nothing for a meta tensor."""
    made, owners = {id(slot.now) for slot in mine}, {id(slot.module) for slot in mine}
    others = [(slot, slot.now) for slot in slots if slot.now is not None and id(slot.now) not in made]
    try:
        for slot, tensor in others:
            whole = id(slot.module) in owners
            slot.held[slot.key] = stands_in = empty(tensor, "cpu" if whole else "meta")
            if whole and not tensor.is_meta:
                stands_in.data.copy_(tensor)
        yield
    finally:
        for slot, tensor in others:
            slot.held[slot.key] = tensor


# Initialising ---------------------------------------------------------------------------------------------------------


class Initialising(TorchDispatchMode):
    """A mode of torch that seeds each random op and notes which memory is written.

    The seed is made of the path of the tensor that the op fills and the number of earlier draws for it; if the op fills
    none of the model's tensors, of the path of the current module. `names`: the model's paths by the tensors' memory.
    """

    def __init__(self, seed: int, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed, self.names = seed, names
        self.path, self.torn = "", False
        self.draws: Counter[str] = Counter()
        self.written: set[int] = set()

    def enter(self, path: str, torn: bool) -> None:
        """The next ops belong to the module at `path`. `torn`: some of its tensors are on the meta device."""
        self.path, self.torn = path, torn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        written = set(map(memory_of, written_by(func, args, kwargs or {})))
        self.written |= written
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draw(next((self.names[key] for key in written if key in self.names), None))
        return func(*args, **kwargs or {})

    def _draw(self, name: str | None) -> None:
        if name is None and self.torn:
            raise MaterializeError(
                f"the first values of {self.path or 'the model'}, of which only a part is made here, are drawn apart "
                "and then copied, so they would depend on the part; draw in place (normal_, uniform_, trunc_normal_), "
                "or in reset_parameters of the module that has the tensor"
            )
        name = f"{self.path}()" if name is None else name
        torch.default_generator.manual_seed(seed_of(self.seed, name, self.draws[name]))
        self.draws[name] += 1


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator of torch writes into."""
    for at, argument in enumerate(schema(func).arguments):
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        if argument.is_write and value is not None:
            yield from value if isinstance(value, (list, tuple)) else (value,)


def seed_of(seed: int, path: str, draw: int) -> int:
    """The seed of a random op: 63 bits of a hash, the same on every machine.

    >>> seed_of(0, "0.weight", 0) == seed_of(0, "0.weight", 0) != seed_of(0, "1.weight", 0)
    True
    """
    return int.from_bytes(blake2b(f"{seed}/{path}/{draw}".encode(), digest_size=8).digest()) >> 1


def memory_of(tensor: Tensor) -> int:
    return int(memory_key(tensor))


def initialise(model: nn.Module, slots: Sequence[Slot], seed: int, init: Init | None) -> None:
    """Set the tensors in these slots by `reset_parameters` of their modules and then `init`. Raises MaterializeError if
    one is not set."""
    everything = list(slots_of(model))
    around = with_parents(slots)
    torn = with_parents([slot for slot in everything if slot.now is not None and slot.now.is_meta])
    names = {memory_of(slot.now): slot.full for slot in reversed(everything) if slot.now is not None}
    mode = Initialising(seed, names)
    made = {memory_of(slot.now) for slot in slots if slot.now is not None and slot.now.numel()}
    with torch.random.fork_rng(devices=[]), torch.no_grad(), mode:
        for path, module in children_first(model):
            if path in around:
                mode.enter(path, path in torn)
                reset = next((found for name in RESETS if callable(found := getattr(module, name, None))), None)
                if reset is not None:
                    called(reset, (), module, path)
                if init is not None:
                    called(init, (module, path), module, path)
    missed = [slot for slot in slots if slot.now is not None and memory_of(slot.now) in made - mode.written]
    if missed:
        pairs = list(dict.fromkeys((type(slot.module).__name__, slot.key) for slot in missed))
        kind, key = pairs[0]
        lines = [f"    if isinstance(module, {kind}): module.{key}.copy_(...)" for kind, key in pairs]
        how = (
            f"Give {kind} a method reset_parameters that sets {key}, or pass init=init, and write before"
            f"{listed(['def init(module, path):', *lines])}"
        )
        if init is None and callable(getattr(model, "_init_weights", None)):  # of a model of transformers
            how = "Pass init=lambda module, path: model._init_weights(module), by which the model's library sets them"
        raise MaterializeError(
            f"these tensors have no values:{listed([f'{slot}: {unset(slot, init)}' for slot in missed])}\n{how}"
        )


def with_parents(slots: Sequence[Slot]) -> set[str]:
    """The paths of the modules that have one of these slots, themselves or in a submodule."""
    found: set[str] = set()
    for slot in slots:
        path = slot.path
        while path not in found:
            found.add(path)
            path = path.rpartition(".")[0]
    return found


def children_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules by their first paths, each after its children, in the order of `model.apply`."""
    paths = {module: path for path, module in model.named_modules()}
    done: set[nn.Module] = set()

    def walk(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for child in module.children():
            if child not in done:
                yield from walk(child)
        done.add(module)
        yield paths[module], module

    return walk(model)


def called(function: Callable[..., Any], args: Sequence[Any], module: nn.Module, path: str) -> None:
    """Call the function; an error gets a note that names the module."""
    try:
        function(*args)
    except Exception as error:
        name = getattr(function, "__name__", "init")
        error.add_note(f"in {name} of {path or 'the model'} ({type(module).__name__}), on the way to its first values")
        raise


def unset(slot: Slot, init: Init | None) -> str:
    """Why a tensor has no values, in words."""
    reset = next((name for name in RESETS if hasattr(slot.module, name)), None)
    if not slot.saved and reset is None:
        return "it was computed in __init__, and the meta device computes nothing"
    names = [*([reset] if reset else []), *(["init"] if init else [])]
    own = "" if reset else f"{type(slot.module).__name__} has no reset_parameters"
    return "; ".join(part for part in (own, f"{' and '.join(names)} did not set it" if names else "") if part)


def listed(faults: Sequence[str]) -> str:
    """One fault per line, at most MOST_FAULTS of them."""
    more = [f"and {len(faults) - MOST_FAULTS} more"] if len(faults) > MOST_FAULTS else []
    return "".join(f"\n  {fault}" for fault in [*faults[:MOST_FAULTS], *more])
