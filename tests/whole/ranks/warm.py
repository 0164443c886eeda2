"""Imported by the server that ranks are forked from: what the first capture of a process loads is there already."""

from torch import nn, ones

from fxpipe.capture import capture
from tests.helpers.garbage import collect_seldom
from tests.whole.ranks import cases

__all__ = ["cases"]

capture(nn.Linear(2, 2), (ones(2, 2),))
collect_seldom()
