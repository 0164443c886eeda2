"""Sizes that stand for any number while a stage is traced.

Each size of the program is a symbol, whose value while tracing is a large prime that divides no number of the stage. If
torch turns a size into a plain number (some of its functions, such as `lstm`, know no symbols), it is still recognised:
3027 is 3 times 1009, which is `3*b`. Whether the ops depend on that prime is found by tracing with another one. A size
that the graph holds for only up to some number, such as the length of a table of positions, has a smaller prime, by
which it is not recognised. A size that values of tensors decide, as that of `x[mask]`, is a size like others here.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice, product
from types import MappingProxyType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor

from fxpipe.ir.graph.value_types import BATCH, Dim, TensorType, dim_size, holds
from fxpipe.torch_internals.tracing.tensors_without_memory import Symbols

TRIED = (64, 17, 13, 8, 5, 4, 3, 2)  # sizes for which a condition is checked
PRIMES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069, 1087, 1091, 1093, 1097, 1103, 1109)
LEAST = 29  # by smaller ones, no size is recognised
MOST = 256  # numbers up to this are tried where no prime fits
ENOUGH = 3  # sizes for which a condition does not hold
SMALLER = (521, 509, 257, 251, 127, 113, 67, 61, 31, 29, 13, 11, 7, 5, 3)


class Sizes:
    """The sizes of a program, by `names`, and those that data decides in a stage, `decided`: each with its bound.
    `computed`: numbers that are computed from them.

    - `numbers`: the plain numbers that occur in the stage; `turn`: which primes.
    - `symbolic`: whether the sizes are symbols; else they are plain numbers from the beginning.
    - `fitting`: whether a size for which no prime meets the conditions has any number that does, by which it is not
      recognised; else it has a prime nevertheless, as torch may not ask.
    - `given`: sizes that have these numbers. By a prime among them a size is recognised too, though a plain number may
      be taken for it: the trace serves only to be compared with another one.
    - `conditions`: those of the graph, which the primes meet if any do; `fixed`: the sizes that they leave no choice.
    - `rows`: how many samples a micro-batch has, if the graph holds for one number or two; they are met by this number.
      The batch size has a prime nevertheless, since replicas take slices of a micro-batch.
    - `marks`: the numbers by which sizes are recognised, all primes but those that occur in the stage, where no other
      fits; `guessed`: whether a plain number was taken for a size that has one of the smaller primes.

    `fake` is the mode in which tensors have these sizes; `values`: each size, as a symbol or a number; `chosen`: as a
    number. `numbers` has the names of numbers that the stage computes from sizes, such as `b / 8`, by their
    expressions.
    """

    def __init__(
        self,
        names: Collection[str],
        numbers: Collection[int],
        turn: int = 0,
        symbolic: bool = True,
        given: Mapping[str, int] = MappingProxyType({}),
        conditions: Sequence[str] = (),
        decided: Mapping[str, str] = MappingProxyType({}),
        computed: Mapping[str, Dim] = MappingProxyType({}),
        fitting: bool = False,
    ) -> None:
        self.symbolic, self.known, self.given, self.fitting = symbolic, tuple(conditions), given, fitting
        self.decided, self.computed = decided, computed
        self._named: dict[sympy.Symbol, sympy.Symbol] = {}
        self._texts: dict[sympy.Expr, str] = {}  # what has been asked, since sympy is slow
        self._names: dict[sympy.Symbol, str] = {}
        self._against: dict[sympy.Expr, list[dict[str, int]]] = {}
        self._asked: dict[str, sympy.Expr] = {}  # by their texts
        self.symbols = Symbols(cached=not symbolic)  # an entry costs more than it saves where shapes are symbols
        self.fake = self.symbols.fake
        self.numbers: dict[Any, str] = {}
        self.guessed = False
        free = [prime for prime in (*PRIMES, *SMALLER) if not any(number and number % prime == 0 for number in numbers)]
        marks = {name: number for name, number in given.items() if number in free}
        free = [prime for prime in free if prime not in given.values()]
        used: set[int] = set()
        fixing = filter(None, (re.fullmatch(r"(\w+) (?:== (\d+)|in \[(\d+), .*)", text) for text in conditions))
        fixed = {found[1]: int(found[2] or found[3]) for found in fixing}
        self.rows = {name: number for name, number in fixed.items() if name == BATCH}
        self.fixed = {name: fixed[name] for name in names if name in fixed and name != BATCH}
        wanted = [name for name in (*names, *decided) if name not in self.fixed and name not in given]
        if len(free) < (turn + 1) * len(wanted):
            raise ValueError(f"{len(wanted)} sizes vary, which is more than can be told apart")
        for _ in range(turn):
            self._choose(wanted, free, used)
        self.primes, self.equal = self._choose(wanted, free, used)
        self.marks = {name: number for name, number in self.primes.items() if number in free} | marks
        if fitting and not given and self.marks.keys() == self.primes.keys():
            raise ValueError("every size has a prime that fits")  # so this would be the same trace again
        own = {**self.primes, **given}
        self.chosen: dict[str, int] = self._complete(own)
        self.values: dict[str, Any] = self.chosen
        if symbolic:
            self.values = self._complete({name: self._symbol(name, number) for name, number in own.items()})

    def _choose(
        self, names: Sequence[str], free: Sequence[int], used: set[int]
    ) -> tuple[dict[str, int], dict[str, str]]:
        """Choose numbers that are not `used` yet, primes among those that are free or others. Returns them, and the
        names of the sizes that must be equal to one of these."""
        primes, equal = dict[str, int](), dict[str, str]()
        for name in names:
            known = {**self.given, **primes}
            chosen = primes | {one: known[other] for one, other in equal.items()}
            left = [number for number in free if number not in used]
            prime = next((number for number in left if self._meets(chosen | {name: number})), None)
            other = next((one for one in known if self._meets(chosen | {name: known[one]})), None)
            fitting = [n for n in range(MOST, 0, -1) if self._meets(chosen | {name: n})] if prime is None else []
            own = [n for n in (*SMALLER, *fitting) if n in fitting and n not in used and n not in known.values()]
            if prime is None and other is not None and not own:
                equal[name] = other
                continue
            if len(fitting) == 1:
                self.fixed[name] = fitting[0]  # as where 16 * b == b * seq
                continue
            primes[name] = prime or (own[0] if self.fitting and own else left[0])
            used.add(primes[name])
        return primes, equal

    def _complete(self, values: dict[str, Any]) -> dict[str, Any]:
        """With the sizes that these and the conditions leave no choice."""
        values = values | {name: values[other] for name, other in self.equal.items()} | self.fixed
        return values | {name: dim_size(size, values) for name, size in self.computed.items()}

    def _meets(self, numbers: Mapping[str, int]) -> bool:
        """Whether the graph may hold for these sizes."""
        numbers = {**self.fixed, **self.given, **numbers, **self.rows}
        return _all_hold(self.known, frozenset(numbers.items()))

    def _symbol(self, name: str, prime: int) -> Any:
        symbol, size = self.symbols.size(name, prime)
        self._named[symbol], self._names[symbol] = self._titled(name), name
        return size

    def _titled(self, name: str) -> Any:
        """What stands for a size in the text of a type."""
        return sympy.Symbol(f"({self.decided[name]})" if name in self.decided else name, integer=True)

    def _text(self, expression: Any) -> str:
        text = str(expression)
        return text[1:-1] if text[1:-1] in self.decided.values() else text

    def shape(self, kind: TensorType) -> list[Any]:
        """The shape of a type, with symbols."""
        return [dim_size(dim, self.values) for dim in kind.shape]

    def told(self, tensor: Tensor, names: Collection[str]) -> Tensor:
        """The tensor, with the one of these sizes in place of one that only a run tells; as it is, if there is not one
        of each."""
        numbers = (*tensor.shape, *tensor.stride())
        symbols = {symbol for number in numbers if not self.knows(number) for symbol in number.node.expr.free_symbols}
        if not symbols or len(names) != 1 or len(unknown := symbols - self._named.keys()) != 1:
            return tensor
        [name], [symbol] = names, unknown
        known = {**self._named, symbol: sympy.Symbol(name)}
        shape, strides = ([self._with(number, known) for number in one] for one in (tensor.shape, tensor.stride()))
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)

    def _with(self, number: Any, known: Mapping[Any, Any]) -> Any:
        return dim_size(str(number.node.expr.xreplace(known)), self.values) if type(number) is not int else number

    def knows(self, size: int | torch.SymInt) -> bool:
        """Whether a size is a number, one of the program's, or computed from them."""
        return not isinstance(size, torch.SymInt) or bool(size.node.expr.free_symbols <= self._named.keys())

    def text(self, value: Any) -> Dim:
        """A size as a type says it: a number, or an expression over the names."""
        if isinstance(value, torch.SymInt):
            expression = value.node.expr
            if not expression.is_number:
                if expression not in self._texts:
                    self._texts[expression] = self._text(in_whole_numbers(expression).xreplace(self._named))
                return self._texts[expression]
            value = int(expression)
        return self._recognised(int(value))

    def _recognised(self, number: int) -> Dim:
        if number == sys.maxsize:  # the end of a slice, which 127 divides
            return number
        found = sympy.Integer(1)
        for name, prime in self.marks.items() if number else ():
            while (prime >= LEAST or name in self.given) and number % prime == 0:
                number, found = number // prime, found * self._titled(name)
                self.guessed |= prime not in PRIMES
        return number if found == 1 else self._text(number * found)

    @property
    def key(self) -> Any:
        """Equal for sizes that are chosen alike."""
        chosen = (self.primes, self.equal, self.fixed, self.decided, self.computed, self.given, self.marks)
        return self.symbolic, *(pair for pairs in chosen for pair in pairs.items())

    @property
    def reusable(self) -> bool:
        """Whether another stage may be traced with these sizes. What torch has found out about them counts as found in
        that stage, too, unless it is about values of this one, or is that a size is a number."""
        env = self.symbols.env
        return not (self.numbers or env.replacements) and env.var_to_range.keys() <= self._named.keys()

    @property
    def specialised(self) -> bool:
        """Whether a size is a number, torch has turned it into one, or a number was taken for a size and may not be."""
        return not self.symbolic or bool(self.symbols.env.replacements) or self.guessed

    def conditions(self) -> dict[str, list[dict[str, int]]]:
        """What torch has found out about sizes on the way, and what does not hold for all of them, each with sizes for
        which it does not hold. Sizes of 1 are left out: torch asks for them because of strides and broadcasting, which
        change no value here."""
        found = {}
        for guard in self.symbols.env.guards:
            if against := self._counterexamples(guard.expr):
                equal = isinstance(guard.expr, sympy.Eq) and guard.expr.atoms(sympy.Integer) & {*self.marks.values()}
                if not equal:  # where the size has become a number, see `specialised`
                    text = str(guard.expr.xreplace(self._named))
                    found[text], self._asked[text] = against, guard.expr
        return found

    def holding(self, conditions: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
        """Those of the conditions that hold for these sizes."""
        return {text: value for text, value in conditions.items() if self._is_true(self._asked[text], sizes)}

    def _is_true(self, condition: Any, sizes: Mapping[str, int]) -> bool:
        numbers = {symbol: sympy.Integer(sizes[self._names[symbol]]) for symbol in condition.free_symbols}
        return bool(condition.xreplace(numbers) == sympy.true)

    def _counterexamples(self, condition: Any) -> list[dict[str, int]]:
        """Some sizes for which a condition does not hold, of those that are tried, and for which the graph may hold."""
        if condition not in self._against:
            names = [self._names[symbol] for symbol in sorted(condition.free_symbols, key=str)]
            tried = (dict(zip(names, numbers, strict=True)) for numbers in product(TRIED, repeat=len(names)))
            failing = (sizes for sizes in tried if self._meets(sizes) and not self._is_true(condition, sizes))
            self._against[condition] = list(islice(failing, ENOUGH))
        return self._against[condition]


@lru_cache(maxsize=8192)  # the same sizes are tried for each stage and trace
def _all_hold(conditions: tuple[str, ...], sizes: frozenset[tuple[str, int]]) -> bool:
    numbers = dict(sizes)
    return all(holds(condition, numbers) for condition in conditions)


def in_whole_numbers(size: Any) -> Any:
    """A size without the detour by floats that `arange(n, -n, -1.0)` makes: ceil((-n - n) / -1.0) is 2*n."""
    if "Float" not in str(size):
        return size
    whole = {number: sympy.Integer(int(number)) for number in size.atoms(sympy.Float) if number % 1 == 0}
    changes = {
        "ToFloat": lambda call: call.args[0],
        "FloatTrueDiv": lambda call: call.args[0] * call.args[1] if abs(call.args[1]) == 1 else call,
        "CeilToInt": lambda call: call.args[0] if call.args[0].is_integer else call,
    }
    size = size.xreplace(whole)
    for name, change in changes.items():
        size = size.replace(lambda call, name=name: call.func.__name__ == name, change)
    return size


def size_tree(text: str) -> ast.expr:
    """An expression over sizes, parsed."""
    return ast.parse(text, mode="eval").body


def numbers_in(values: Iterable[Any]) -> set[int]:
    """The plain numbers in a nest of arguments."""
    found: set[int] = set()
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool):
            found.add(value)
        elif isinstance(value, (tuple, list)):
            found |= numbers_in(value)
        elif isinstance(value, Mapping):
            found |= numbers_in(value.values())
        elif isinstance(value, slice):
            found |= numbers_in((value.start, value.stop, value.step))
    return found
