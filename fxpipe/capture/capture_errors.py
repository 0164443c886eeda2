"""Errors of capture: the user's line, the reason in one sentence, what to write instead."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from tabulate import tabulate
from torch import fx, nn

from fxpipe.batching.op_errors import DATA_SIZES, SYMBOL, UNKNOWN, at
from fxpipe.errors import CaptureError, FxpipeError
from fxpipe.ir.graph.graph import Origin
from fxpipe.ir.graph.module_parts import SET_NO_PARAMETER

TORCH = str(Path(torch.__file__).parent)
OURS = str(Path(__file__).parent)
STANDARD = str(Path(linecache.__file__).parent)  # the library of Python, which holds site-packages too
INSTALLED = r"[/\\](?:site|dist)-packages[/\\]"
NOTATIONS = rf"{INSTALLED}(?:einops|einx)[/\\]"  # other ways of writing torch's operations

FROM_NUMBERS = ("tensor", "as_tensor", "asarray", "scalar_tensor")  # functions that make tensors of numbers
HOOKED = "a module in the model has a backward hook, which would not run"
DERIVES = "it takes derivatives inside of forward"
WRITTEN_OUT = "write them out, as operations"
LOOKS_INTO_LIST = "it looks into a list whose items are the samples"
LOOKS_INTO_RESULT = "it looks into a list that a submodule kept whole returns, with other items for each batch"
A_PIPE = "it runs a pipeline of fxpipe"  # a part of the message about a call of a pipe
# A pattern of Dynamo's message, the reason, what to write instead.
ADVICE = (
    (
        A_PIPE,
        "it calls a pipe, and a pipe cannot be a part of what another one cuts",
        "write `plain = pipe.model` before and plain(x) here, or call the pipe before and pass what it returns",
    ),
    (
        LOOKS_INTO_LIST,
        LOOKS_INTO_LIST,
        "let a submodule of its own or the loss function do that, or pass one tensor, padded, in place of the list",
    ),
    (
        LOOKS_INTO_RESULT,
        LOOKS_INTO_RESULT,
        "let that submodule return one tensor, or do this in it",
    ),
    (
        r"[Dd]ata-dependent (branch|jump)|Data-dependent branching",
        "which way it goes depends on the values of a tensor",
        "write torch.where(condition, a, b) in place of `if`",
    ),
    (
        r"specialized integer from data-dependent expression|Pending unbacked symbols",
        "it uses a tensor as a Python number, which an index x[i] with a 0-dim tensor does too",
        "keep it a tensor: the operations take 0-dim tensors; in an index, write x[i[None]]; what a loop counts to, "
        "make an int of the model's: self.depth = 3",
    ),
    (
        r"\.item\(\)|Tensor\.item|to scalar|data-dependent expression|tolist",
        "it turns a tensor's value into a Python number",
        "keep it a tensor: the operations take 0-dim tensors too",
    ),
    (
        r"[Dd]ynamic shape operator|[Dd]ynamic output shape|nonzero|masked_select",
        *DATA_SIZES,
    ),
    (
        r"`(pack_padded_sequence|pad_packed_sequence|pack_sequence)`",
        "it packs sequences, and how many there are at a step depends on their lengths, which are data",
        "leave the padding in, and mask what comes of it",
    ),
    (
        r"`print`|builtin print|[Ll]ogger|logging",
        "it prints or logs",
        "take that out of forward, or put it under `if not torch.compiler.is_compiling():`",
    ),
    (
        r"does not know how to trace the (Python )?builtin",
        "it calls a function that is written in C, which cannot be read",
        "call it before, and pass what it returns to the model",
    ),
    (
        r"[Mm]odule-level backwards? hooks",
        HOOKED,
        "put the hook on a parameter or a tensor, as in weight.register_hook(...), or on the pipe itself",
    ),
    (
        r"autograd\.grad",
        DERIVES,
        WRITTEN_OUT,
    ),
    (
        r"nn\.Parameter\(\)",
        "it makes a parameter",
        f"make it in __init__, or call the model once before: model(x); in place of another, {SET_NO_PARAMETER}",
    ),
    (
        r"Missing `as_proxy\(\)`",
        "it gives a function of torch what is no tensor or number, such as a list whose items are the samples, or one "
        "that a submodule kept whole returns",
        "let a submodule do that, which returns a tensor",
    ),
)
# What an op of torch asserts of its symbols for sizes, and what the model itself raised.
ASSERTED = r"got AssertionError\((['\"])(.*?)\1"
OWN_ERRORS = r"(?:got|raised exception) (\w+)\((['\"])(.*?)\2,?\)"


# The source of each symbol in torch's messages, by Dynamo's name; (name, dim) for the size of a tensor.
Sizes = Mapping[str, str | tuple[str, int]]


Kind = TypeVar("Kind", bound=FxpipeError)


class Refused(CaptureError):
    """A call cannot be captured in the way that was tried.

    - `where`: the user's line; `reason`: why; `advice`: what to write instead.
    - `modules`: the ids of the modules whose forward has the line, outermost first; None if no line is the cause.
    - `sizes`: the sources of the symbols in the reason.
    - `attempt_label`: the way that was tried, in words.
    - `steered`: whether values of inputs led there.
    - `frames`: the calls that led to the line, outermost first.
    """

    def __init__(
        self,
        where: Origin | None,
        reason: str,
        advice: str = "",
        modules: Sequence[int] | None = None,
        sizes: Sizes | None = None,
        *,
        attempt_label: str = "",
        steered: bool = False,
        frames: Sequence[traceback.FrameSummary] = (),
    ) -> None:
        super().__init__(f"{at(where)}cannot be captured: {reason}" + (f"; {advice}" if advice else ""))
        self.where, self.reason, self.advice, self.modules, self.sizes = where, reason, advice, modules, sizes or {}
        self.attempt_label, self.steered, self.frames = attempt_label, steered, frames

    def spelled(self, spell: Callable[[str | tuple[str, int]], str], attempt_label: str) -> Refused:
        """The refusal with the user's names of sizes in place of torch's symbols, as in [2, s33] or
        `s33: hint = 4`."""

        def word(found: re.Match[str]) -> str:
            return spell(self.sizes[found[1]]) if found[1] in self.sizes else UNKNOWN

        reason, steered, frames = re.sub(SYMBOL, word, self.reason), self.steered, self.frames
        return Refused(
            self.where, reason, self.advice, self.modules, attempt_label=attempt_label, steered=steered, frames=frames
        )

    @property
    def is_placed(self) -> bool:
        """Whether `modules` has the place of the cause: not for exceptions of the model, nor for hooks."""
        return self.modules is not None and self.reason != HOOKED and not self.reason.startswith("it raises ")

    def in_no_submodule(self) -> Refused:
        """The refusal to keep a submodule whole: the line is in the model's own forward, or in the loss function."""
        return Refused(
            self.where,
            "it is in the forward of no submodule, and kept whole, the model would have one stage",
            "move these lines into the forward of a submodule",
            attempt_label="keeping a submodule whole",
        )


class NoOps(CaptureError):
    """The model computes nothing for such a call."""


class StaticSizesRequired(FxpipeError):
    """What runs a graph does better with constants than with symbols for lengths: capture it again so."""


def no_two_alike(model: nn.Module) -> CaptureError:
    """The error for a model whose every call is of a new kind."""
    return CaptureError(
        f"{type(model).__name__}, or a hook on it, changes what it depends on, so that no two calls are of one kind; "
        "does it append to a list? A hook may do so, and do nothing else with the list; else put values into a dict, "
        "or return them. Does it count in a global variable? Let it count in the model: self.count += 1"
    )


def no_ops(model: nn.Module) -> NoOps:
    """What is raised for a call in which the model has no ops."""
    return NoOps(f"{type(model).__name__} has no ops: there is nothing to run on devices; call it itself")


class ValuesOfOtherSamples(CaptureError):
    """Values of the whole batch are in a graph that holds for micro-batches of some sizes only."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"forward reads values of its inputs, and runs other ops depending on the batch size of {path}; "
            "read the values before the call, and pass them to the model, or write chunks=1"
        )


class OutsideOfModules(CaptureError):
    """The refused line is in no module's forward, but in a loss function."""


def made_of_floats(graph: fx.Graph) -> Refused | None:
    """The refusal of the first op that makes a tensor of Python's floats, in a graph for which numpy has returned some:
    `torch.tensor(np.sqrt(2))` is f64, `torch.tensor(2 ** 0.5)` is f32, and a trace knows no difference."""
    for node in graph.nodes:
        makes = node.op == "call_function" and getattr(node.target, "__name__", "") in FROM_NUMBERS
        if makes and node.kwargs.get("dtype") is None and _has_float(node.args):
            advice = "give torch.tensor a dtype, or numpy's function a tensor, as in torch.sqrt"
            return Refused(line_of(node), "it makes a tensor of a number of numpy's", advice, modules_around(node))
    return None


def _has_float(nest: Any) -> bool:
    return any(map(_has_float, nest)) if isinstance(nest, (list, tuple)) else type(nest) is float


def written_by_dynamo(graph: fx.Graph) -> Refused | None:
    """The refusal of the first op that Dynamo inserted for numpy, which runs only inside Dynamo; None if none."""
    for node in graph.nodes:
        if type(node.target).__module__ == "torch._dynamo.utils":
            return Refused(line_of(node), "it computes with numpy", "write it with torch", modules_around(node))
    return None


def modules_around(node: fx.Node) -> list[int]:
    """The ids of the modules whose forward made a node, outermost first."""
    return [int(str(key).partition("@")[0]) for key in node.meta.get("nn_module_stack") or ()]


def line_of(node: fx.Node, module: str = "") -> Origin | None:
    """The user's line that a node comes from."""
    return _origin(_frame_of(node.meta.get("stack_trace")), module)


@lru_cache(maxsize=256)  # the ops of a line have one stack, and so has the line in each of equal layers
def _frame_of(stack: str | None) -> traceback.FrameSummary | None:
    return _innermost(parse_stack(stack))


def failed(error: Exception, attempt_label: str) -> Refused:
    """The refusal for an exception of the model, as plain Python or as Dynamo has transformed it."""
    where = innermost(traceback.extract_tb(error.__traceback__))
    found = Refused(where, f"it raises {type(error).__name__}: {error}", attempt_label=attempt_label)
    found.__cause__ = error
    return found


def refusal(
    error: BaseException,
    modules: Sequence[int] | None = None,
    where: Origin | None = None,
    sizes: Sizes | None = None,
    steered: bool = False,
) -> Refused:
    """The refusal for an error of Dynamo in these modules. `where`: the line, if known better than from the error;
    `sizes`: the sources of its symbols; `steered`: whether values of inputs led there."""
    text = str(error)
    stack = next((s for e in (error, error.__cause__) if (s := getattr(e, "real_stack", None))), None)
    where = where or innermost(list(stack or ())) or _in_text(text)
    if (ours := getattr(error, "inner_exception", None)) is not None:  # of what Dynamo gives its trace to
        return Refused(
            where, f"fxpipe fails with {type(ours).__name__}: {ours}", "report this: it is a defect", steered=steered
        )
    if A_PIPE in text:
        modules = None  # nor is it one where a submodule is kept whole
    return Refused(where, *_reason(text), modules, sizes, steered=steered, frames=list(stack or ()))


def refusals(tried: Sequence[Refused]) -> CaptureError:
    """The error for a call that could not be captured in any way: the first refusal, then a table of all."""
    if len(tried) == 1 or tried[-1].steered:
        return tried[-1]
    rows = [(one.attempt_label, str(one.where or ""), one.reason, one.advice) for one in tried]
    table = tabulate(
        rows,
        headers=("tried", "stopped at", "because", "write instead"),
        tablefmt="simple",
        maxcolwidths=[24, 36, 36, 36],
    )
    kind = OutsideOfModules if any(one.is_placed and not one.modules for one in tried) else CaptureError
    return kind(f"{tried[0]}\n\nWhat was tried, in order:\n{table}")


def _reason(text: str) -> tuple[str, str]:
    """The reason in one sentence, and what to write instead, or ""."""
    if asserted := re.search(ASSERTED, text):
        return f"torch cannot tell the sizes of what it makes: {asserted[2]}", ""
    if raised := re.search(OWN_ERRORS, text, re.DOTALL):
        return f"it raises {raised[1]}: {raised[3]}", ""
    said = "\n".join(line for line in text.split("\n") if not line.lstrip().startswith(("Hint:", "from user code")))
    for pattern, reason, advice in ADVICE:
        if re.search(pattern, said):
            return reason, advice
    first = text.strip().split("\n", 1)[0]
    explanation = re.search(r"Explanation: (.*)", text)
    return f"{first}: {explanation[1].strip()}" if explanation else first, ""


def _in_text(text: str) -> Origin | None:
    return innermost(
        [
            traceback.FrameSummary(file, int(line), name, lookup_line=False)
            for file, line, name in re.findall(r'File "([^"]+)", line (\d+), in (\S+)', text)
        ]
    )


def innermost(frames: Sequence[traceback.FrameSummary], module: str = "") -> Origin | None:
    """The innermost line of the user's code among `frames`. Never a line of fxpipe's capture; a line of torch or of a
    notation for its operations (einops) only if there is no other."""
    return _origin(_innermost(frames), module)


def _innermost(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    others = [frame for frame in frames if not frame.filename.startswith(OURS)]
    mine = [frame for frame in others if _is_users(frame.filename)] or others
    return mine[-1] if mine else None


def _origin(frame: traceback.FrameSummary | None, module: str) -> Origin | None:
    if frame is None:
        return None
    line = frame.lineno or 0
    code = linecache.getline(frame.filename, line).strip() or (frame.line or "").strip()
    return Origin(frame.filename, line, code, module)


def _is_users(file: str) -> bool:
    if file.startswith(STANDARD) and not re.search(INSTALLED, file):
        return False
    return not file.startswith((TORCH, "<")) and not re.search(NOTATIONS, file)


def parse_stack(text: str | None) -> list[traceback.FrameSummary]:
    """The frames in a node's stack trace."""
    found: Iterable[Any] = re.finditer(r'File "([^"]+)", line (\d+), in ([^\n]*)(?:\n\s+([^\n]*))?', text or "")
    return [traceback.FrameSummary(m[1], int(m[2]), m[3], lookup_line=False, line=m[4] or "") for m in found]


def without_frames(error: Kind) -> Kind:
    """The error without tracebacks, also of its causes and contexts. The frames of a capture hold tensors without
    memory; printing one, as pytest and debuggers do, crashes the process."""
    seen: set[BaseException] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        if (one := todo.pop()) is not None and one not in seen:
            seen.add(one)
            one.__traceback__ = None
            todo += [one.__cause__, one.__context__]
    return error
