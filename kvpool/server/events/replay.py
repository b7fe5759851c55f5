"""Replay of messages: the buffer of recent messages, and the replays that are being sent to peers.

`ReplayBuffer` is bounded in messages and in bytes. `Replays` sends it piece by piece, a few messages to each peer in turn: a
peer that does not read is skipped, and after STALLED_S without progress its replay ends. ZMQ holds at most PEER_MESSAGES_MAX
messages for a peer, and at most PEERS_MAX peers have any: one that has stalled counts until its connection has certainly ended
(HELD_S, by heartbeats that a peer which does not read cannot answer). Requests beyond that wait.

One thread, the publisher's.
"""

import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.clock import Clock, Deadline

Message = tuple[bytes, bytes, bytes]
NUMBER = struct.Struct(">Q")
# Of 64 KiB each: with PEERS_MAX, peers that do not read cost 16 MiB at most.
PEER_MESSAGES_MAX = 8
PEERS_MAX = 32
# Topics whose numbers are remembered, as many as the publisher has at most; of others nothing counts as lost.
TOPICS_KNOWN_MAX = 8192
# Buffered messages examined for one peer before the next one's turn.
LOOKS_PER_TURN = 256
STALLED_S = 5.0
HEARTBEAT_S = 5.0
HELD_S = 3 * HEARTBEAT_S
# Retry interval for a peer that takes nothing; it grows from the first to the second.
RETRY_MS_MIN, RETRY_MS_MAX = 1, 64


class ReplayBuffer:
    """The latest messages of all topics, by a number that rises over all of them.

    Invariants: `_messages` holds exactly the numbers `first` up to `end`; at most `messages_max`, and `bytes_max` bytes unless
    there is a single one.
    """

    def __init__(self, *, messages_max: int, bytes_max: int) -> None:
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._messages: dict[int, Message] = {}
        # The first number of each topic, and the number behind the last one that was dropped.
        self._spans: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self.used_bytes = 0
        self.first = 0
        self.end = 0

    def __len__(self) -> int:
        return len(self._messages)

    def __getitem__(self, at: int) -> Message:
        return self._messages[at]

    def append(self, message: Message) -> None:
        """Add the next message; the oldest ones are dropped to make room."""
        self._messages[self.end] = message
        if message[0] not in self._spans:
            self._spans[message[0]] = (NUMBER.unpack(message[1])[0], 0)
            if len(self._spans) > TOPICS_KNOWN_MAX:
                self._spans.popitem(last=False)
        self.end += 1
        self.used_bytes += _bytes_of(message)
        while len(self) > self._messages_max or (self.used_bytes > self._bytes_max and len(self) > 1):
            oldest = self._messages.pop(self.first)
            self.first += 1
            self.used_bytes -= _bytes_of(oldest)
            if oldest[0] in self._spans:
                self._spans[oldest[0]] = (self._spans[oldest[0]][0], NUMBER.unpack(oldest[1])[0] + 1)

    def has_lost(self, number: int, topic: bytes | None) -> bool:
        """Whether messages from a number on, of one topic or of any, have left the buffer. A number without a topic is of
        those that have begun below it; one below all is of all."""
        if topic is not None:
            return number < self._spans.get(topic, (0, 0))[1]
        begun = [lost for first, lost in self._spans.values() if first <= number]
        return any(number < lost for lost in begun or (lost for _, lost in self._spans.values()))


@dataclass(slots=True)
class Replay:
    """Replay for one peer: messages from `number` on, of `topic` (None: of all), in the buffer's order."""

    peer: bytes
    number: int
    topic: bytes | None
    at: int
    end: int
    until: Deadline

    def wants(self, message: Message) -> bool:
        """Whether a message is one of these."""
        return NUMBER.unpack(message[1])[0] >= self.number and self.topic in (None, message[0])


class Replays:
    """All replays under way. `send(peer, message)` sends a message, or with None the end.

    False: the peer takes none now. It raises ConnectionError where the peer has gone.

    Invariant: a peer has at most one replay, and is in `_replays` or in `_stalled`, never in both; together they are at most
    PEERS_MAX.
    """

    def __init__(self, buffer: ReplayBuffer, send: Callable[[bytes, Message | None], bool], clock: Clock) -> None:
        self._clock = clock
        self._buffer = buffer
        self._send = send
        self._replays: dict[bytes, Replay] = {}
        self._stalled: dict[bytes, Deadline] = {}
        self._retry_ms = RETRY_MS_MIN
        self.unsent_replays = 0

    def __len__(self) -> int:
        return len(self._replays)

    @property
    def wait_ms(self) -> int | None:
        """Milliseconds until there may be work that no descriptor signals; None: never."""
        if self._replays:
            return self._retry_ms
        return RETRY_MS_MAX if not self.has_room else None

    @property
    def has_room(self) -> bool:
        """Whether a further peer can be served."""
        now_over = [peer for peer, until in self._stalled.items() if until.has_passed()]
        for peer in now_over:
            del self._stalled[peer]
        return len(self._replays) + len(self._stalled) < PEERS_MAX

    def begin_replay(self, peer: bytes, number: int, topic: bytes | None) -> None:
        """Start a replay for a peer from a number on; this ends its earlier one."""
        assert self.has_room
        if peer in self._stalled:
            self.unsent_replays += 1
            return
        if self._replays.pop(peer, None) is not None:
            self.unsent_replays += 1
        buffer = self._buffer
        self._replays[peer] = Replay(peer, number, topic, buffer.first, buffer.end, Deadline(STALLED_S, self._clock))

    def send_waiting(self) -> int:
        """Send as much as peers take now. Returns how many messages that was."""
        sent = 0
        for replay in list(self._replays.values()):
            count = self._go_on_with(replay)
            sent += count
            if count:
                replay.until = Deadline(STALLED_S, self._clock)
            elif replay.until.has_passed() and self._replays.pop(replay.peer, None) is not None:
                self._stalled[replay.peer] = Deadline(HELD_S, self._clock)
                self.unsent_replays += 1
        self._retry_ms = RETRY_MS_MIN if sent else min(RETRY_MS_MAX, 2 * self._retry_ms)
        return sent

    def _go_on_with(self, replay: Replay) -> int:
        """How many messages a peer took, or were skipped for it."""
        done = 0
        replay.at = max(replay.at, self._buffer.first)
        try:
            while done < LOOKS_PER_TURN:
                message = self._buffer[replay.at] if replay.at < replay.end else None
                if (message is None or replay.wants(message)) and not self._send(replay.peer, message):
                    break
                done += 1
                replay.at += 1
                if message is None:
                    del self._replays[replay.peer]
                    break
        except ConnectionError:
            del self._replays[replay.peer]
            self.unsent_replays += 1
        return done


def _bytes_of(message: Message) -> int:
    return sum(map(len, message))
