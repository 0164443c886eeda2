"""Records what torch's dispatcher runs, as ops with names of their own.

Autograd runs above the dispatcher, so what arrives here are the functions that eager mode runs too, in the same order:
nothing is decomposed, no op is turned into one without side effects. So the recorded ops draw the same random numbers
and write the same memory as the model itself.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir.graph.dtypes import short_name
from fxpipe.ir.graph.graph import Op, Origin, Ref, map_leaves
from fxpipe.ir.graph.value_types import Dim, ObjectType, ScalarType, TensorType, TupleType, ValueType
from fxpipe.ir.program.program import OWN_DEVICE
from fxpipe.passes.backward.refused import Refused
from fxpipe.passes.backward.tracing.data_sized_ops import with_known_sizes
from fxpipe.passes.backward.tracing.fake_sizes import Sizes, size_tree
from fxpipe.torch_internals.op_modes import TorchDispatchMode
from fxpipe.torch_internals.operator_classes import schema
from fxpipe.torch_internals.tensor_memory import storage_key
from fxpipe.torch_internals.tracing.tensors_without_memory import python_kernels, unset_fake_temporarily

aten = torch.ops.aten
SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}  # of which the result is the argument
# What the results of functions with several are called.
RESULTS = {
    "native_layer_norm": ("layer_norm", "mean", "rstd"),
    "native_group_norm": ("group_norm", "mean", "rstd"),
    "native_batch_norm": ("batch_norm", "mean", "invstd"),
    "native_dropout": ("dropout", "mask"),
    "max_pool2d_with_indices": ("max_pool2d", "indices"),
    "nll_loss_forward": ("nll_loss", "total_weight"),
    "nll_loss2d_forward": ("nll_loss", "total_weight"),
    "log_sigmoid_forward": ("logsigmoid", "buffer"),
    "_scaled_dot_product_flash_attention_for_cpu": ("attention", "logsumexp"),
    "max": ("values", "indices"), "min": ("values", "indices"), "sort": ("values", "indices"),
    "topk": ("values", "indices"), "cummax": ("values", "indices"), "cummin": ("values", "indices"),
}  # fmt: skip
_SIZE_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
UNKNOWN = {"mkldnn_rnn_layer"}  # their results on fake tensors are not those of a run
NOWHERE = Origin("", 0, "", "")
# The functions that sympy and torch write into a size.
_SIZE_FUNCTIONS: dict[str, Any] = {
    "Mod": operator.mod, "PythonMod": operator.mod, "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv,
    "Max": max, "Min": min,
}  # fmt: skip
SIZE_FUNCTIONS = {*_SIZE_OPERATORS.values(), *_SIZE_FUNCTIONS.values(), operator.neg}  # that compute sizes in a trace


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records ops into `ops`, which the owner replaces. Enter it inside of a FakeTensorMode. An op that makes a tensor
    on `device`, that of the trace, makes it on the stage's own device: a replica of the stage has another one.

    - `names`: the name of each tensor, by id; `types`: the type of each name.
    - `origin`: gives the origin of what is recorded now; `decided`: the sizes that data decides in it.
    - `drew`: the recorded ops that draw random numbers.
    - `memory`: for each name the first name of its memory, and the bytes of all that memory.
    """

    def __init__(self, sizes: Sizes, device: torch.device, taken: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes, self.device = sizes, device
        self.taken = set(taken)
        self.ops: list[Op] = []
        self.names: dict[int, str] = {}
        self.types: dict[str, ValueType] = {}
        self.origin: Callable[[], Origin] = lambda: NOWHERE
        self.decided: Callable[[], Collection[str]] = tuple
        self.drew: set[str] = set()
        self.memory: dict[str, tuple[str, Dim]] = {}
        self._silent = False
        self._owners: dict[int, str] = {}
        self._alive: list[Any] = []
        self._last: dict[str, int] = {}  # numbers up to this one are taken

    def hold(self, tensor: Tensor, name: str) -> None:
        """From now on the tensor is called this."""
        self.names[id(tensor)] = name
        self._alive.append(tensor)
        storage = tensor.untyped_storage()
        self.memory[name] = self._owners.setdefault(storage_key(storage), name), self.sizes.text(storage.nbytes())

    @contextmanager
    def silent(self) -> Iterator[None]:
        """A context in which nothing is recorded."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def fresh(self, wish: str) -> str:
        """A name that is not taken."""
        name, number = wish, self._last.get(wish, 0)
        while name in self.taken:
            number += 1
            name = f"{wish}_{number}"
        self.taken.add(name)
        self._last[wish] = number
        return name

    def fresh_like(self, name: str) -> str:
        """A name that is not taken, of the same word."""
        return self.fresh(re.sub(r"_\d+$", "", name))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._silent or func.namespace == "prim":  # the device of a tensor, which torch asks for often
            return func(*args, **kwargs)
        if func is aten.unbind.int:
            self._check_count(*args)
        # As Dynamo does, since some kernels of torch know symbols only in Python.
        with python_kernels() if self.sizes.symbolic else nullcontext():
            result = with_known_sizes(func, args, self.sizes, self.decided())
            if result is None:
                result = func(*args, **kwargs)
        self._record(func, args, kwargs, result)
        return result

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if func in SAME:
            is_constant = func is aten.lift_fresh.default and id(args[0]) not in self.names
            self.hold(result, self._constant(args[0], result) if is_constant else self._name(args[0], func))
            return
        tensors = [x for x in _flat(result) if isinstance(x, Tensor)]
        written = [x for x in _written(func, args, kwargs) if isinstance(x, Tensor)]
        if not tensors and not written:
            return
        writes = tuple(dict.fromkeys(self._name(x, func) for x in written))
        args = _without_statistics(func, args)
        if func is aten._to_copy.default and not isinstance(args[0], Tensor):  # a vmap makes a tensor of a number
            func, kwargs = aten.scalar_tensor.default, {"dtype": result.dtype, "device": result.device}
        given = map_leaves((args, dict(kwargs)), lambda leaf: self.argument(leaf, func))
        wish = schema(func).name.partition("::")[2].strip("_")
        if wish in UNKNOWN or not all(self.sizes.knows(size) for x in tensors for size in x.shape):
            raise Refused(f"{wish} has a result of a size that only a run tells")
        again = bool(writes) and written[0] is result and writes[0] in self.types  # x.mul_(2) is x again
        name = self.fresh_like(writes[0]) if again else self.fresh(wish)
        several = isinstance(result, (tuple, list))
        kind = self.type_of(result)
        self.types[name] = kind
        op = Op(name, func, given[0], given[1], kind, self.origin(), (), writes)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drew.add(name)
        self.ops.append(op)
        if not several:
            self.hold(result, name)
            return
        titles = RESULTS.get(schema(func).name.partition("::")[2], ())
        for place, item in enumerate(result):
            if isinstance(item, Tensor):
                part = self.fresh(titles[place] if place < len(titles) else f"{wish}_{place}")
                self.types[part] = self.type_of(item)
                getitem = Op(part, operator.getitem, (Ref(name), place), {}, self.types[part], op.origin)
                self.ops.append(getitem)
                self.hold(item, part)

    def _constant(self, real: Tensor, made: Tensor) -> str:
        """The name of a tensor that torch has made of Python's numbers, as of the list in x[:, [0, 2]]. Records an op
        that makes it."""
        name = self.fresh("constant")
        with unset_fake_temporarily():
            numbers = real.tolist()
        self.types[name] = kind = self.type_of(made)
        given = {"dtype": made.dtype, "device": self._placed(made.device)}
        self.ops.append(Op(name, torch.tensor, (numbers,), given, kind, self.origin()))
        return name

    def _check_count(self, tensor: Tensor, dim: int = 0) -> None:
        """Refuse to take a tensor apart along a size that varies, as an LSTM does: the ops that follow are as many."""
        size = self.sizes.text(tensor.shape[dim])
        if isinstance(size, str):
            raise Refused(f"unbind gives {size} tensors, so how many ops follow depends on a size")

    def _name(self, tensor: Tensor, func: Any) -> str:
        name = self.names.get(id(tensor))
        if name is None:
            raise Refused(f"{func} reads a tensor that is made outside of the stage")
        return name

    def argument(self, leaf: Any, func: Any) -> Any:
        """A leaf of the arguments of a function, in an op."""
        if isinstance(leaf, Tensor):
            return Ref(self._name(leaf, func))
        if isinstance(leaf, torch.SymInt) or type(leaf) is int:
            return self.size(self.sizes.text(leaf))
        if isinstance(leaf, torch.SymFloat) and leaf.node.expr in self.sizes.numbers:
            return Ref(self.sizes.numbers[leaf.node.expr])
        if isinstance(leaf, (torch.SymFloat, torch.SymBool)):
            raise Refused(f"{func} computes with a number that depends on sizes")
        return self._placed(leaf) if isinstance(leaf, torch.device) else leaf

    def _placed(self, device: torch.device) -> Any:
        return OWN_DEVICE if device == self.device else device

    def size(self, text: int | str) -> Any:
        """A size as an argument: a number, or a reference to the size or to an op that computes it."""
        if isinstance(text, int):
            return text
        return self._size(size_tree(text))

    def _size(self, tree: ast.expr) -> Any:
        match tree:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name):
                return Ref(name)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _SIZE_OPERATORS:
                return self._computed(_SIZE_OPERATORS[type(op)], left, right)
            case ast.Call(func=ast.Name(id=called), args=[left, right]) if called in _SIZE_FUNCTIONS:
                return self._computed(_SIZE_FUNCTIONS[called], left, right)
            case ast.Compare(left=ast.Name(id=name)):  # with a bound: see `data_sized_ops.py`
                return Ref(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._computed(operator.neg, operand)
        raise Refused(f"the size {ast.unparse(tree)} cannot be computed")

    def _computed(self, function: Any, *given: ast.expr) -> Ref:
        name, args = self.fresh("size"), tuple(map(self._size, given))
        self.types[name] = ScalarType("int")
        self.ops.append(Op(name, function, args, {}, ScalarType("int"), self.origin()))
        return Ref(name)

    def type_of(self, value: Any) -> ValueType:
        """The type of a traced value."""
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                raise Refused("there is a sparse tensor in it")
            shape = tuple(self.sizes.text(size) for size in value.shape)
            return TensorType(short_name(value.dtype), shape, str(value.device), False)
        if isinstance(value, (tuple, list)):
            return TupleType(tuple(map(self.type_of, value)))
        for kinds, kind in (((bool,), "bool"), ((int, torch.SymInt), "int"), ((float,), "float")):
            if isinstance(value, kinds):
                return ScalarType(kind)
        return ObjectType("None" if value is None else type(value).__name__)


def _without_statistics(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of batch norm's backward without running statistics, which it ignores in training: forward has
    changed them since."""
    if func is aten.native_batch_norm_backward.default and args[7]:
        return (*args[:3], None, None, *args[5:])
    return args


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that the function writes."""
    if func in (aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default):
        if args[5] and args[3] is not None:  # it does not say so
            yield from args[3:5]
        return
    for place, argument in enumerate(schema(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from _flat(value)


def marked_draws(ops: list[Op], drew: Collection[str], draw: int) -> list[Op]:
    """The ops with the number `draw` on all from the first random one to the last: what one op of the model draws comes
    from one seed."""
    places = [place for place, op in enumerate(ops) if op.name in drew]
    if not places:
        return ops
    first, last = places[0], places[-1]
    return [replace(op, draw=draw) if first <= place <= last else op for place, op in enumerate(ops)]
