"""Profiles: what is refused, the table, and the JSON round trip."""

import pytest

from fxpipe.ir.plan.profile import OpCost, Profile, check, dump, load

PROFILE = Profile("Net", 8, "cpu:0", "measured", (OpCost("fc", 1e-3, 2e-3, 100, 2000, 64), OpCost("y", 1e-6)))


def test_print():
    assert str(PROFILE) == (
        "Net, measured on cpu:0, batch 8\n"
        "name    forward    backward    saved    output    parameters\n"
        "fc      1 ms       2 ms        100 B    2 kB      64 B\n"
        "y       1 us       0 s         0 B      0 B       0 B\n"
        "total   1 ms       2 ms        100 B    2 kB      64 B"
    )


def test_json_round_trip():
    assert load(dump(PROFILE)) == PROFILE


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"columns": ["name"], "ops": []}'])
def test_text_that_is_not_a_profile(text):
    with pytest.raises(ValueError, match=r"not JSON|: write|is no field here"):
        load(text)


def test_for_another_model():
    check(PROFILE, ["fc", "y"])
    with pytest.raises(ValueError, match="first difference is at op 1, y in the profile and relu in the model"):
        check(PROFILE, ["fc", "relu", "y"])
    with pytest.raises(ValueError, match=r"it has 2 ops, the model 1; .* y in the profile and nothing in the model"):
        check(PROFILE, ["fc"])


@pytest.mark.parametrize("cost", [OpCost("fc", -1.0), OpCost("fc", float("nan")), OpCost("fc", saved=-1)])
def test_impossible_costs(cost):
    with pytest.raises(ValueError, match="below zero"):
        check(Profile("Net", 8, "cpu:0", "measured", (cost,)), ["fc"])
