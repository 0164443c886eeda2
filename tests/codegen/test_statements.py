"""The few statements that schedulers are made of."""

import pytest

from fxpipe.codegen.lines import Brackets
from fxpipe.codegen.statements import assign


@pytest.mark.parametrize(
    "targets", [["m.y"], ["m.lent." + "very_long_name_" * 7], ["m.a", "m.b"], ["m." + "n" * 60] * 2]
)
def test_what_is_assigned(targets):
    lines = assign(targets, Brackets("give(", ("1", "self.stages[0].weight"), ")"), 0)
    names = ", ".join(targets)
    text = "".join(line.strip() for line in lines).replace(",)", ")")
    # One target gets the value itself, several get its parts.
    expected = [f"{left} = give(1,self.stages[0].weight)" for left in (names, f"({names.replace(' ', '')})")]
    assert text.replace("1, ", "1,") in expected[: len(targets)]
