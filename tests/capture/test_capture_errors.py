"""Which line of a stack is the user's."""

import traceback

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from fxpipe.capture.capture_errors import innermost, refusal

INSTALLED = "/home/me/env/lib/python3.11/site-packages"
MODEL, LIBRARY = ("/home/me/model.py", 7), (f"{INSTALLED}/vit_pytorch/vit.py", 41)
NOTATION = (f"{INSTALLED}/einops/einops.py", 533), (f"{INSTALLED}/einops/_backends.py", 96)
TORCH = (f"{torch.__path__[0]}/nn/functional.py", 12)


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        ([MODEL, TORCH], MODEL),
        ([MODEL, LIBRARY, TORCH], LIBRARY),
        ([MODEL, LIBRARY, *NOTATION, TORCH], LIBRARY),
        ([MODEL, TORCH, *NOTATION], MODEL),
        ([("/home/einops/model.py", 3), *NOTATION], ("/home/einops/model.py", 3)),
        ([*NOTATION], NOTATION[-1]),
        ([], None),
    ],
)
def test_the_users_line(stack, line):
    found = innermost([traceback.FrameSummary(file, number, "forward", lookup_line=False) for file, number in stack])
    assert (found and (found.file, found.line)) == line


def test_packed_sequences_are_named():
    said = "Attempted to call function marked as skipped: ... the function `pack_padded_sequence` in file `rnn.py`"
    found = refusal(RuntimeError(said))
    assert "it packs sequences" in found.reason
    assert "leave the padding in" in found.advice


def test_a_defect_of_fxpipe_is_called_one():
    error = BackendCompilerFailed(lambda: None, KeyError("weight"), None)
    found = refusal(error)
    assert found.reason == "fxpipe fails with KeyError: 'weight'"
    assert found.modules is None  # no submodule is kept whole for it
