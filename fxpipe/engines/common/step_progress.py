"""What the workers of a step tell each other besides values: who is done, and what has failed."""

from __future__ import annotations

from collections.abc import Collection

from fxpipe.engines.transports.mailbox import Transport


class Progress:
    """How far the workers of a step are.

    - `done`: the workers at the end of their rows.
    - `failed`: the errors, in the order in which they happened.
    - `mailboxes`: those of all workers.
    """

    def __init__(self, mailboxes: Collection[Transport]) -> None:
        self.mailboxes = mailboxes
        self.done: list[str] = []
        self.failed: list[BaseException] = []

    def stop(self, error: BaseException) -> None:
        """Record an error, and stop all workers: none starts another action."""
        self.failed.append(error)
        for mailbox in self.mailboxes:
            mailbox.put(None)
