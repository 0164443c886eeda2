"""The command `fxpipe doctor`: what of this machine affects pipes, and whether pipes compute correctly on it."""

from __future__ import annotations

import argparse

from fxpipe.api import doctor
from fxpipe.pipe.progress import working


def add(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--run", dest="verify", action="store_true", help="verify a small model on every device and backend there is"
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the findings. Returns 1 if something is broken."""
    with working("looking at this machine"):
        findings = [*doctor.look(), *(doctor.run() if options.verify else ())]
    print(doctor.table(findings))
    broken = [one.what for one in findings if one.state == doctor.BROKEN]
    print(f"\nbroken: {', '.join(broken)}" if broken else "\nnothing is broken")
    return 1 if broken else 0
