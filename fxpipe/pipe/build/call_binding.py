"""From a call to the values of a graph: its kind, inputs, batch size, and the numbers of symbolic sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import InputError
from fxpipe.ir.graph.evaluate_graph import with_totals
from fxpipe.ir.graph.graph import Graph, Input, Ref, Struct
from fxpipe.ir.plan.profile import Profile
from fxpipe.ir.program.program import Program
from fxpipe.ir.program.whole_batch import WholeBatch
from fxpipe.ir.sample_lists import CountedRows, SampleList, counted, packed
from fxpipe.profiling import measure
from fxpipe.runtime.microbatch import scatter, split_sizes

from .build import Build

SPARSE = "sparse"  # in `Graph.layouts`
SPARSE_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
Pairs = list[tuple[Struct, Any]]  # of a template and the value at its place


def kind_of(graph: Graph, training: bool, sizes: Mapping[str, int] | None) -> tuple[Any, ...]:
    """The key of the build for a call. Calls that differ only in constants, as after `model.mask = mask`, have the same
    ops and so the same key. `sizes` are given if the build is for these sizes only."""
    return id(graph.ops), training, *(() if sizes is None else sizes.items())


def layouts(graph: Graph, tensors: Mapping[str, Tensor], inputs: Sequence[Any], copies: bool) -> dict[str, str]:
    """As `Graph.layouts`. `copies`: whether generated code is to be used where it copies what is not contiguous. Of
    inputs only images and volumes with channels last count, for which kernels are faster: others are copied in no
    time."""
    found = {}
    for name, x in (
        *((state.name, tensors.get(state.path, state.value)) for state in graph.states),
        *((item.name, x) for item, x in zip(graph.inputs, inputs, strict=False)),
    ):
        if not isinstance(x, Tensor) or x.is_nested:
            continue
        if x.layout in SPARSE_LAYOUTS:
            found[name] = SPARSE
        elif not copies and not x.is_contiguous() and (isinstance(x, nn.Parameter) or has_channels_last(x)):
            found[name] = "not contiguous in memory"
    return found


def sparse_inputs(graph: Graph, inputs: Sequence[Any]) -> tuple[str, ...]:
    """The inputs that are sparse in this call: autograd computes the backward of what reads them."""
    pairs = zip(graph.inputs, inputs, strict=False)
    return tuple(item.name for item, x in pairs if isinstance(x, Tensor) and x.layout in SPARSE_LAYOUTS)


def has_channels_last(x: Tensor) -> bool:
    """Whether the tensor is one of images or volumes, with the channels last in memory."""
    ways = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in ways and x.is_contiguous(memory_format=ways[x.dim()])


def with_states(made: Build, graph: Graph) -> Build:
    """The build with the states of `graph`, which has the same ops."""
    parts = (state for state in made.program.graph.states if state.part)
    ordered = replace(made.program.graph, states=(*graph.states, *parts))

    def renewed(program: Program | None, part: Graph | None) -> Program | None:
        if program is None or part is None:
            return None
        return replace(program, graph=replace(program.graph, states=part.states))

    whole = WholeBatch(renewed(made.whole.totals, graph.totals), renewed(made.whole.epilogue, graph.epilogue))
    now = replace(made.graph, states=graph.states, totals=graph.totals, epilogue=graph.epilogue)
    return replace(made, graph=now, program=replace(made.program, graph=ordered), whole=whole)


def check_even(samples: int, chunks: int) -> None:
    """Raise InputError if micro-batches would differ in size: a strategy is for one size."""
    if len(set(split_sizes(samples, chunks))) > 1:
        raise InputError(
            f"a batch of {samples} cannot be cut into {chunks} micro-batches of one size, as a strategy needs them: "
            f"give a multiple of {chunks} samples, as DataLoader(drop_last=True) does, or compile with other chunks"
        )


def real(graph: Graph, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The values of the graph's states by name; `tensors` are the model's, by path."""
    return {s.name: s.value if s.kind == "constant" else tensors[s.path] for s in graph.states}


def micro_batch_sizes(graph: Graph, inputs: Sequence[Any], chunks: int) -> dict[str, int]:
    """The number of each symbolic size for the first micro-batch, which is the largest. A whole number among the inputs
    may be a size, too."""
    rows = split_sizes(batch_size(graph, inputs), chunks)[0]
    known = {item.name: (item, value) for item, value in given(graph, inputs)}
    sizes = {name: value for name, (_, value) in known.items() if type(value) is int}
    for size in graph.sizes:
        item, value = known[size.input]
        sizes[size.name] = rows if size.dim == item.batch_dim else int(value.shape[size.dim])
    return sizes


def batch_size(graph: Graph, inputs: Sequence[Any]) -> int:
    """Samples in a batch; 1 if no input is cut."""
    cut = (value.shape[item.batch_dim] for item, value in given(graph, inputs) if item.batch_dim is not None)
    return next(map(int, cut), 1)


def given(graph: Graph, inputs: Sequence[Any]) -> Iterator[tuple[Input, Any]]:
    """The inputs that the caller gives (not those from totals), with their values."""
    return zip((item for item in graph.inputs if item.path), inputs, strict=True)


def as_call(example_inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """(args, kwargs) from a tuple of arguments, a dict of keyword arguments, or one tensor."""
    if isinstance(example_inputs, Mapping):
        return (), example_inputs
    return (example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)), {}


def measured(
    graph: Graph, inputs: Sequence[Any], tensors: Mapping[str, Tensor], rows: Sequence[int], device: str
) -> Profile:
    """The measured profile of the first micro-batch. `rows`: the samples of each micro-batch; `tensors`: the model's,
    by path."""
    values = {item.name: value for item, value in given(graph, inputs)}
    with torch.no_grad():
        whole = with_totals(graph, values, {} if graph.totals is None else real(graph.totals, tensors))
    pieces = {item.name: scatter(whole[item.name], item.batch_dim, rows)[0] for item in graph.inputs}
    return measure(graph, pieces, real(graph, tensors), device)


def bound(graph: Graph, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the graph's inputs in a call, by name."""
    found: dict[str, Any] = {}
    with_counts: Pairs = []
    match(graph.call, (args, kwargs), found, with_counts)
    names = {item.path: item.name for item in graph.inputs}
    for template, value in with_counts:
        values, places, by = (part for _, part in template.fields)
        made = counted(values.name, value, by, found[names[by]])
        found |= {values.name: made.values, places.name: made.places}
    return found


def match(template: Any, value: Any, found: dict[str, Any], with_counts: Pairs | None = None) -> None:
    """Store in `found`, by name, the part of `value` at the place of each `Ref` in the template. Rows that another
    input counts are added to `with_counts`, with their template."""
    if isinstance(template, Ref):
        found.setdefault(template.name, value)
    elif isinstance(template, Struct) and template.cls is SampleList:
        match(template.fields[0][1], packed("a list", value), found)
    elif isinstance(template, Struct) and template.cls is CountedRows:
        if with_counts is not None:
            with_counts.append((template, value))
    elif isinstance(template, Struct):
        for name, part in template.fields:
            match(part, getattr(value, name), found, with_counts)
    elif isinstance(template, (tuple, list)):
        for part, piece in zip(template, value, strict=True):
            match(part, piece, found, with_counts)
    elif isinstance(template, Mapping):
        for key, part in template.items():
            match(part, value[key], found, with_counts)
