"""Faults of the SSD tier's I/O in one direction, from its last success on: how many, since when, and what the latest was.

Reads and writes fail by themselves: a disk that takes writes and fails every read is no healthy one. Control thread only;
`now_ns` is an argument.
"""

import os

import kvpool_native
from kvpool.clock import NS_PER_S
from kvpool.tiers.ssd.plan import segment_name
from kvpool.units import format_duration


class IoFaults:
    """See the module. `limit`: so many in a row suspend the direction. `is_suspended`: until a retry has succeeded."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit
        self._first_ns = 0
        self._last_ns = 0
        self._text = ""
        self.in_row = 0
        self.is_suspended = False

    def note_fault(self, text: str, now_ns: int) -> None:
        """One more."""
        self._first_ns = self._first_ns if self.in_row else now_ns
        self._last_ns = now_ns
        self._text = text
        self.in_row += 1
        self.is_suspended = self.is_suspended or self.in_row >= self._left

    def note_success(self) -> None:
        """I/O in this direction has succeeded."""
        self.in_row = 0
        self.is_suspended = False
        self._left = self._limit

    def resume(self) -> None:
        """A probe has succeeded: until I/O has, too, a single fault suspends the direction again."""
        self.in_row = 0
        self._left = 1 if self.is_suspended else self._left
        self.is_suspended = False

    def describe(self) -> str:
        """The latest fault and the number of those in a row; empty without one."""
        if not self.in_row:
            return ""
        if self.in_row == 1:
            return self._text
        seconds = max(1, (self._last_ns - self._first_ns) // NS_PER_S)
        return f"{self._text}, {self.in_row} errors in {format_duration(float(seconds))}"


def text_of(queue: kvpool_native.SsdQueue, segment_bytes: int) -> str:
    """What the queue's latest failed I/O was, and its error; empty where none has failed."""
    io = queue.io()
    if not io["fault_error"]:
        return ""
    verb = "write of" if io["fault_is_write"] else "read of"
    segment, at = divmod(io["fault_offset"], segment_bytes)
    error = io["fault_error"]
    return f"{verb} {segment_name(segment)} at {at} failed: [Errno {error}] {os.strerror(error)}"
