"""The campaign itself: its models run, its seeds repeat, it finds what is wrong; and a short one, which is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.campaign import one, recipe, script, setting, shrink, trial
from tests.campaign.campaign import campaign
from tests.campaign.nests import join
from tests.campaign.ranks import Ranks
from tests.campaign.recipe import FORMS, LOSSES, PIECES, Recipe, render
from tests.campaign.setting import Run, Setting
from tests.campaign.subject import Subject, load
from tests.campaign.tally import gist
from tests.campaign.trial import Outcome

SMALL = Recipe((("linear", 1), ("tanh", 2), ("residual", 3), ("linear", 4)))
CALL = Setting({"devices": 2, "chunks": 3}, (Run("call", 5), Run("faulty call", 5, 1)))
STEP = Setting({"devices": 2, "chunks": 3, "schedule": "1f1b"}, (Run("step", 5), Run("faulty step", 5, 1)))


def outcomes(folder: Path, made: Recipe, *settings: Setting) -> list[Outcome]:
    path = one.written(made, folder, "model")
    return list(trial.trial(path, settings, False, Ranks()))


@pytest.mark.parametrize("name", [name for name, piece in PIECES.items() if not piece.risky])
def test_every_piece_is_a_model_that_runs(tmp_path: Path, name: str) -> None:
    made = Recipe(((name, 5),), "dict", "mean")
    subject = Subject(load(one.written(made, tmp_path, "model")))
    found = subject.plain(Run("step", 4), 2)
    assert found.gradients["head.weight"] is not None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_form_has_every_loss(tmp_path: Path, form: str, loss: str) -> None:
    if (loss == "own") != FORMS[form].own_loss:
        return
    made = Recipe((("linear", 1), ("tanh", 2), ("gru cell", 3)), form, loss, seed=3)
    subject = Subject(load(one.written(made, tmp_path, "model")))
    assert subject.plain(Run("step", 5), 2).gradients["head.weight"] is not None


def test_seeds_repeat(tmp_path: Path) -> None:
    first, again, other = (one.drawn(*which, tmp_path) for which in ((12345, 17), (12345, 17), (12345, 18)))
    assert first == again != other
    assert render(first.recipe) == render(again.recipe) != render(other.recipe)


def test_all_pieces_and_settings_are_drawn() -> None:
    names = {name for seed in range(400) for name, _ in recipe.drawn(seed).pieces}
    assert names == PIECES.keys()
    drawn = [one for seed in range(200) for one in setting.drawn(Random(seed), frozenset(), ["m0", "m3", "head"])]
    assert {run.what for one in drawn for run in one.runs} == set(setting.WHAT)
    assert {one.options.get("schedule") for one in drawn} >= {*setting.NAMES, "auto"}
    assert {one.kind for one in drawn} >= {"replicas", "strategy"}
    assert any(isinstance(one.options.get("cut"), list) for one in drawn)
    assert any(isinstance(one.options.get("schedule"), int) for one in drawn)


def test_what_is_right_is_right(tmp_path: Path) -> None:
    found = outcomes(tmp_path, SMALL, CALL, STEP)
    assert [outcome.what for outcome in found] == ["same", "fault", "same", "fault"], found


def nudged(leaves: Any) -> Any:
    return leaves[0] * (1 + 1e-7) if isinstance(leaves[0], Tensor) else leaves[0]


def test_a_wrong_output_is_found_and_made_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = trial.caller

    def wrong(run: Run, subject: Any, pipe: Any) -> Callable[..., Any]:
        return lambda *args: join(nudged, [caller(run, subject, pipe)(*args)])

    monkeypatch.setattr(trial, "caller", wrong)
    (outcome, *_) = outcomes(tmp_path, SMALL, CALL)
    assert outcome.what == "wrong"
    assert "off by 1.0e-07" in outcome.text
    assert outcome.bad


def test_gradients_that_a_fault_has_left_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = trial.caller

    def leaving(run: Run, subject: Any, pipe: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            try:
                return caller(run, subject, pipe)(*args)
            except Exception:
                subject.twin.head.bias.grad = torch.ones(3, dtype=torch.float64)
                raise

        return call

    monkeypatch.setattr(trial, "caller", leaving)
    outcome = outcomes(tmp_path, SMALL, STEP)[-1]
    assert outcome.what == "wrong"
    assert "a step that failed has left gradients of head.bias" in outcome.text


def test_refusals_are_told_apart(tmp_path: Path) -> None:
    """One that names the line of the model, and options that make no sense."""
    by_data = Recipe((("linear", 1),))
    path = one.written(by_data, tmp_path, "model")
    path.write_text(
        path.read_text().replace("return head", "return head * torch.arange(head.shape[0])[:, None] @ self.head.weight")
    )
    (refused, *_) = trial.trial(path, [CALL, STEP], False, Ranks())
    assert refused.what == "refused", refused
    too_many = replace(CALL, options={"devices": 40, "chunks": 2})
    (option,) = outcomes(tmp_path, SMALL, too_many)
    assert option.what == "option", option
    assert gist(refused.text) != gist(option.text)


def test_less_of_a_model_is_a_model(tmp_path: Path) -> None:
    subject = one.drawn(1, 2, tmp_path)
    for index, small in enumerate(islice(shrink.candidates(subject), 20)):
        load(one.written(small.recipe, tmp_path, f"small{index}"))


def test_a_script_runs_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subject = one.Subject(SMALL, (CALL, STEP))
    path = tmp_path / "script.py"
    path.write_text(shrink.script(subject, Outcome("wrong", 0, CALL.runs[0], 'off by """1"""'), "A model."))
    assert script.main(str(path)) == 0
    assert capsys.readouterr().out.count("same: ") == 2


@pytest.mark.slow
def test_a_short_campaign(tmp_path: Path) -> None:
    subject = one.drawn(6, 0, tmp_path, ranks=0.0)
    found: list[Outcome] = []
    assert one.tried(subject, tmp_path, "model0", Ranks(), found.append)
    assert not [outcome for outcome in found if outcome.bad], found
    assert len(found) > 10


@pytest.mark.long
def test_a_campaign(tmp_path: Path) -> None:
    """All kinds of pipes, ranks among them; what fails is in the folder that the message names."""
    tally = campaign(7, 1, tmp_path, iter(range(20)))
    assert not tally.bad, f"{tmp_path}\n{tally.table()}"
    assert tally.compared > 300
    assert tally.counts["fault"] > 30
    assert {"call", "step", "replicas", "strategy", "ranks", "deferred_batch_norm"} <= tally.pipes.keys()
