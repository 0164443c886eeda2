"""Why a stage has no backward as code."""

from __future__ import annotations


class Refused(Exception):
    """The stage cannot be traced, for the reason that this says."""
