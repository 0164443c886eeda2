"""Memory through which one process hands things to another on the same machine; the kernel has no part in it.

    | closed | heard | stamps of letters | letters | stamps of values | values ..................... |

The sender writes, and then stamps what it has written; what has the right stamp may be read. A letter is stamped with
its number, and its place is used again once it has been heard. Values are stamped with the number of their step and lie
one behind the other, at places that both sides know from the order in which they go; the next step begins in front
again, for none begins until every rank has taken all that came to it. A value for which there is no place goes another
way.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from .message_format import Size, length, nbytes

LETTERS, BLOCK = 64, 512  # letters that may wait to be heard, and the bytes of one
VALUES, ROOM = 4096, 2**25  # values of one step, and their bytes: of which the machine gives only what is written to
LINE = 64  # bytes of the machine's unit of memory: none should be written to from both sides
CLOSED, HEARD, LETTER_STAMPS = 0, LINE // 8, 2 * LINE // 8  # in words of 8 bytes
VALUE_STAMPS = LETTER_STAMPS + LETTERS
LETTER = 8 * (VALUE_STAMPS + VALUES)  # in bytes, as what follows
VALUE = LETTER + LETTERS * BLOCK
SIZE = VALUE + ROOM


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a value: its number in the step, and where it begins."""

    shared: SharedBuffer
    number: int
    at: int

    def tensor(self, size: Size) -> Tensor:
        """The place, as the buffer of a message."""
        return torch.frombuffer(self.shared.memory, dtype=size[0], count=length(size), offset=self.at)

    def stamp(self) -> None:
        """What is there may be read."""
        self.shared.words[VALUE_STAMPS + self.number] = self.shared.step

    def there(self) -> bool:
        return self.shared.words[VALUE_STAMPS + self.number] == self.shared.step


class SharedBuffer:
    """One direction, as one of the two processes has it: it begins the same step as the other one, and asks for places
    in the same order. `letters`: how many it has written, or asked for."""

    def __init__(self, file: int) -> None:
        self.memory = mmap.mmap(file, SIZE)
        self.words = memoryview(self.memory).cast("q")
        self.step = self.values = self.letters = 0
        self.end = VALUE

    # Values -----------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """A step begins, whose number no other had."""
        self.step, self.values, self.end = step, 0, VALUE

    def slot(self, size: Size) -> Slot | None:
        """The place of the next value; None if it has to go another way."""
        room = -(-nbytes(size) // LINE) * LINE
        if self.values == VALUES or self.end + room > SIZE:
            return None
        found = Slot(self, self.values, self.end)
        self.values += 1
        self.end += room
        return found

    # Letters ----------------------------------------------------------------------------------------------------------

    def may_write(self) -> bool:
        """Whether there is a place for a letter."""
        return self.letters - self.words[HEARD] < LETTERS

    def write(self, letter: bytes) -> None:
        self.letters += 1
        place = (self.letters - 1) % LETTERS
        start = LETTER + place * BLOCK
        self.memory[start : start + len(letter)] = letter
        self.words[LETTER_STAMPS + place] = self.letters

    def has(self, number: int) -> bool:
        """Whether this letter has come, of which the first is number 1."""
        return self.words[LETTER_STAMPS + (number - 1) % LETTERS] == number

    def read(self, number: int) -> bytes:
        start = LETTER + (number - 1) % LETTERS * BLOCK
        letter = self.memory[start : start + BLOCK]
        self.words[HEARD] = number
        return letter

    # The end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Nothing more will come."""
        self.words[CLOSED] = 1

    def closed(self) -> bool:
        return self.words[CLOSED] == 1
