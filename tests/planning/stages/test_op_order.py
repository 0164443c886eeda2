"""The order of ops: what moves, what must not, and that it never gets worse."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.ir.graph.check_graph import check
from fxpipe.ir.graph.legal_cuts import vmaps
from fxpipe.planning.stages.cut_costs import traffic
from fxpipe.planning.stages.op_order import arrange, reorder, requirements
from tests.helpers.planning_graphs import flat, graph, names, vmap


def arranged(made):
    return names(arrange(made, {cost.name: cost for cost in flat(made).ops}))


def test_a_chain_stays():
    made = graph("a = relu(x)", "b = relu(a)", "c = relu(b)")
    assert arrange(made, {cost.name: cost for cost in flat(made).ops}) is made


def test_interleaved_branches_run_one_after_the_other():
    made = graph(
        "a1 = relu(x)", "b1 = relu(x)", "a2 = relu(a1)", "b2 = relu(b1)", "a3 = relu(a2)", "b3 = relu(b2)",
        "y = add(a3, b3)",
    )  # fmt: skip
    assert arranged(made) == "a1 a2 a3 b1 b2 b3 y"


def test_branches_stay_as_they_are_where_that_costs_the_same():
    made = graph("s = relu(x)", "a1 = relu(s)", "c1 = relu(s)", "a2 = relu(a1)", "c2 = relu(c1)", "y = add(a2, c2)")
    assert arranged(made) == "s a1 c1 a2 c2 y"


def test_a_tensor_made_early_is_made_where_it_is_used():
    made = graph("early = relu(z)", "a = relu(x)", "b = relu(a)", "y = add(b, early)", inputs=("x", "z"))
    assert arranged(made) == "a b early y"


def test_an_update_of_a_buffer_stays_where_it_was():
    made = graph(
        "early = relu(z)", "a = relu(x)", "n1 = add_(n) ! n", "b = batch_norm(a, w)", "y = add(b, early)",
        inputs=("x", "z"), states={"n": "buffer"},
    )  # fmt: skip
    assert arranged(made) == "a n1 b early y"


def test_a_tuple_is_unpacked_at_once():
    made = graph(
        "early = relu(z)", "p = chunk(x) : tuple", "p0 = getitem(p)", "p1 = getitem(p)", "a = relu(p0)", "b = relu(a)",
        "c = add(b, p1)", "y = add(c, early)", inputs=("x", "z"),
    )  # fmt: skip
    assert arranged(made) == "p p0 p1 a b c early y"


def test_readers_keep_their_side_of_a_write():
    made = graph(
        "a = relu(x)", "v = view(a)", "before = relu(v)", "a1 = add_(a) ! a", "after = relu(a1)",
        "y = add(after, before)",
    )  # fmt: skip
    needs = requirements(made)
    assert needs[3] == [0, 1, 2]  # although v is dead when a is written, and not named by the write
    assert 3 in needs[4]


def test_a_view_by_einsum_keeps_its_side_of_a_write():
    """`einsum("ij->ji", a)` gives the memory of what it reads."""
    needs = requirements(graph("a = relu(x)", "v = einsum(a)", "a1 = add_(a) ! a", "y = add(v, a1)"))
    assert needs[2] == [0, 1]
    needs = requirements(graph("a = relu(x)", "v = einsum(a)", "before = relu(v)", "a1 = add_(a) ! a"))
    assert needs[3] == [0, 1, 2]


def test_writes_of_a_state_keep_their_order():
    made = graph(
        "r = mul(x, n)", "n1 = add_(n) ! n", "s = mul(x, n)", "n2 = add_(n) ! n", "y = add(r, s)",
        states={"n": "buffer"},
    )  # fmt: skip
    assert requirements(made)[:4] == [[], [0], [1], [1, 2]]


def test_a_vmap_is_left_before_its_result_is_read_and_moves_whole():
    chain = ["a0 = relu(x)", *(f"a{i} = relu(a{i - 1})" for i in range(1, 9))]
    made = graph(*vmap("early", "z", "noise = rand(batch)"), *chain, "y = add(a8, early)", inputs=("x", "z"))
    assert arranged(made).endswith(" a8 enter_early in_early noise out_early early leave_early y")
    needs = requirements(made)
    assert needs[:6] == [[], [0], [1], [2], [3], [4]]
    assert needs[-1] == [5, 14]


def test_a_very_deep_model():
    lines = ["early = relu(z)", "a0 = relu(x)", *(f"a{i} = relu(a{i - 1})" for i in range(1, 3000))]
    made = graph(*lines, "y = add(a2999, early)", inputs=("x", "z"))
    assert arranged(made).endswith("a2999 early y")


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 14))
def test_any_graph_stays_well_formed_and_never_gets_worse(seed, count):
    made = some_graph(random.Random(seed), count)
    costs = {cost.name: cost for cost in flat(made).ops}
    other = arrange(made, costs)
    check(other)
    assert sorted(names(other).split()) == sorted(names(made).split())
    at = {op.name: position for position, op in enumerate(other.ops)}
    for op, before in zip(made.ops, requirements(made), strict=True):
        assert all(at[made.ops[p].name] < at[op.name] for p in before)
    assert of_vmaps(other) == of_vmaps(made)
    assert sum(traffic(other, costs).values) <= sum(traffic(made, costs).values)


def of_vmaps(made):
    """The ops of each vmap, in order."""
    return {
        made.ops[first].name: names(replace(made, ops=made.ops[first : last + 1])) for first, last in vmaps(made.ops)
    }


def some_graph(rng: random.Random, count: int):
    known, lines = ["x"], []
    for number in range(count):
        reads = rng.sample(known, min(len(known), rng.choice((1, 1, 2))))
        kind = rng.choice(("relu", "relu", "view", "add_", "vmap"))
        if kind == "add_":
            lines.append(f"v{number} = add_({', '.join(reads)}) ! {reads[0]}")
            known.remove(reads[0])
        elif kind == "vmap":
            lines += vmap(
                f"v{number}", *reads[:1], *(f"z{number} = add({read}, in_v{number}) : inside" for read in reads[1:])
            )
        else:
            lines.append(f"v{number} = {kind}({', '.join(reads)})")
        known.append(f"v{number}")
    return graph(*lines)


def test_reorder_by_the_same_order_is_the_same_graph():
    made = graph("a = relu(x)", "b = relu(a)")
    assert reorder(made, [0, 1]) is made
