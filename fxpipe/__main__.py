"""`python -m fxpipe`: the command."""

from __future__ import annotations

import sys

from fxpipe.api.cli.main import main

sys.exit(main())
