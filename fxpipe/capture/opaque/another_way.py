"""What is tried next when a call is refused: a submodule is kept whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxpipe.capture.call_kinds import Attempt
from fxpipe.capture.capture_errors import LOOKS_INTO_RESULT, Refused, failed
from fxpipe.capture.tracing.fx_to_graph import Draft
from fxpipe.capture.twins.twin import Twins
from fxpipe.errors import CaptureError, InputError

from .first_call import SIGNS, warm
from .learn_outputs import learn
from .opaque_submodules import Joins, Pieces, refuse_unbounded_size


def another_way(pieces: Pieces, function: Callable[..., Any], attempt: Attempt, tried: list[Refused]) -> str | None:
    """Prepare the next way: first run forward once, because some libraries set things up in the first call; then keep
    the refused submodule whole, or the one around it. Returns the way in words, or None if there is no other. Ways that
    fail at once are added to `tried`."""
    refused = tried[-1]
    if pieces.warmed < len(pieces.by_key) and any(sign in str(refused) for sign in SIGNS):
        pieces.warmed = len(pieces.by_key)
        warm(attempt.twins, attempt.call, pieces.by_key.values())
        return "one graph, after forward ran once"
    if refused.reason == LOOKS_INTO_RESULT and attempt.call.rows is None and pieces.joins:
        pieces.joins = Joins(pieces.joins - 1)
    elif not pieces.asked and not pieces.keep(attempt.twins, refused):
        if refused.is_placed:
            tried.append(refused.in_no_submodule())
        return None
    while True:
        try:
            odd = learn(pieces, function, attempt.call, attempt.twins, attempt.request.holders)
        except Refused as error:
            tried.append(error)
            return None
        except InputError:  # of lists that may be anything
            raise
        except Exception as error:  # the model's own
            tried.append(failed(error, "running it, to see what a submodule returns"))
            return None
        if odd is None:
            return pieces.how
        tried.append(odd.refusal())
        if not pieces.keep_around(attempt.twins, odd, tried[-1]):
            return None


def refusal_of(error: CaptureError, draft: Draft | None, twins: Twins) -> Refused | None:
    """Turns an error raised while the graph was completed into a Refused that `another_way` can act on: it names what
    to keep whole, or says that a returned list is looked into. None if neither would help."""
    if isinstance(error, Refused) and error.reason == LOOKS_INTO_RESULT:
        return error
    return None if draft is None else refuse_unbounded_size(draft.graph, twins)
