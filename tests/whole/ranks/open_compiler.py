"""What ranks do in test_open_compiler_ranks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import fxpipe
from tests.whole.ranks.cases import raises
from tests.whole.test_open_compiler import OPTIONS, loss, make, quantised, without_tanh


def opened(group: Any, folder: Path, backward: str) -> None:
    """A step with transforms has the gradients of the model changed by hand, by autograd or as code; then from its
    package; then one with a pass that is wrong is refused on every rank."""
    model, x, target = make()
    plain = quantised(model)
    wanted = loss(plain(x), target)
    wanted.backward()
    want = {name: parameter.grad for name, parameter in plain.named_parameters()}
    how = {**OPTIONS, "devices": None, "schedule": "1f1b", "group": group, "timeout": 60, "backward": backward}
    pipe = fxpipe.compile(model, **how)
    torch.testing.assert_close(pipe.step(x, target=target, loss_fn=loss), wanted.detach())
    as_code = [stage.backward is not None for stage in pipe.build.program.stages]
    assert as_code == [backward == "code", False], "the last stage calls a function of the user's"
    pipe.save(folder)
    got = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    pipe.close()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, want[name], msg=name)
    loaded = fxpipe.load(folder, make()[0], group=group)
    torch.testing.assert_close(loaded.step(x, target=target, loss_fn=loss), wanted.detach())
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter.grad, want[name], msg=name)
    loaded.close()
    with_pass = fxpipe.compile(make()[0], **{**how, "transforms": [], "passes": [without_tanh]})
    with_pass.step(x, target=target, loss_fn=loss)
    last = ["without_tanh", *(["lower_backward"] if backward == "code" else [])]
    assert list(with_pass.trail)[-len(last) :] == last
    with_pass.close()
    wrong = fxpipe.compile(make()[0], **{**how, "transforms": [], "passes": [lambda program, context: None]})
    with raises("returns NoneType; return the Program"):
        wrong.step(x, target=target, loss_fn=loss)
    wrong.close()
