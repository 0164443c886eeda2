"""Shared memory through which one process sends data to another on the same machine, without system calls.

    | closed | heard | stamps of letters | letters | stamps of values | values ..................... |

The sender writes data, then its stamp; data with the expected stamp may be read. A letter, a small message, is stamped
with its number; its place is free again once it has been read ("heard"). Values are stamped with the number of their
step, and lie one behind the other: both sides know the places from the order of the values. Each step starts at the
front again, as no step begins before every rank has taken all values sent to it. A value that does not fit goes by TCP
if it has at most `SMALL` bytes (`tcp_peer.py`), else by gloo.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from .message_format import Size, length, nbytes

LETTERS, BLOCK = 64, 512  # the most unread letters, and the bytes of one
VALUES, ROOM = 4096, 2**25  # the most values in a step, and their bytes; the system only allocates pages that are used
LINE = 64  # bytes of a cache line: no line should be written by both sides
CLOSED, HEARD, LETTER_STAMPS = 0, LINE // 8, 2 * LINE // 8  # offsets in words of 8 bytes
VALUE_STAMPS = LETTER_STAMPS + LETTERS
LETTER = 8 * (VALUE_STAMPS + VALUES)  # offset in bytes, as the two below
VALUE = LETTER + LETTERS * BLOCK
SIZE = VALUE + ROOM


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a value: its number in the step, and its offset in bytes."""

    shared: SharedBuffer
    number: int
    at: int

    def tensor(self, size: Size) -> Tensor:
        """A message buffer at this place."""
        return torch.frombuffer(self.shared.memory, dtype=size[0], count=length(size), offset=self.at)

    def stamp(self) -> None:
        """Mark the value as written: from now on the other process may read it."""
        self.shared.words[VALUE_STAMPS + self.number] = self.shared.step

    def there(self) -> bool:
        return self.shared.words[VALUE_STAMPS + self.number] == self.shared.step


class SharedBuffer:
    """One direction of a connection, as one of its two processes sees it. Both begin the same steps, and ask for places
    in the same order. `letters`: the number of letters written, or asked for."""

    def __init__(self, file: int) -> None:
        self.memory = mmap.mmap(file, SIZE)
        self.words = memoryview(self.memory).cast("q")
        self.step = self.values = self.letters = 0
        self.end = VALUE

    # Values -----------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Begin a step, with a number that no step had before."""
        self.step, self.values, self.end = step, 0, VALUE

    def slot(self, size: Size) -> Slot | None:
        """The place of the next value; None if it does not fit."""
        room = -(-nbytes(size) // LINE) * LINE
        if self.values == VALUES or self.end + room > SIZE:
            return None
        found = Slot(self, self.values, self.end)
        self.values += 1
        self.end += room
        return found

    # Letters ----------------------------------------------------------------------------------------------------------

    def may_write(self) -> bool:
        """Whether there is room for another letter."""
        return self.letters - self.words[HEARD] < LETTERS

    def write(self, letter: bytes) -> None:
        self.letters += 1
        place = (self.letters - 1) % LETTERS
        start = LETTER + place * BLOCK
        self.memory[start : start + len(letter)] = letter
        self.words[LETTER_STAMPS + place] = self.letters

    def ask(self) -> int:
        """The number of the next letter."""
        self.letters += 1
        return self.letters

    def has(self, number: int) -> bool:
        """Whether the letter of this number has arrived; the first is number 1."""
        return self.words[LETTER_STAMPS + (number - 1) % LETTERS] == number

    def read(self, number: int) -> bytes:
        start = LETTER + (number - 1) % LETTERS * BLOCK
        letter = self.memory[start : start + BLOCK]
        self.words[HEARD] = number
        return letter

    # The end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Tell the other process that nothing more will be sent."""
        self.words[CLOSED] = 1

    def closed(self) -> bool:
        return self.words[CLOSED] == 1
