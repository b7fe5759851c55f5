"""What a writer may ask: reserve, commit, end, over the slots of the native directory.

Joins the directory, which makes room and publishes, with the records of who writes and until when. It schedules nothing
and speaks no protocol; `now_ns` is an argument. Control thread only.

Invariant: every reservation in the directory is in `Reservations`, with the same number.
"""

from dataclasses import dataclass

import kvpool_native
from kvpool import failpoint
from kvpool.errors import ProtocolError, Refused
from kvpool.index.reservations import Reservation, Reservations
from kvpool.index.retention import DURATION_BYTES, keep
from kvpool.index.reuse import Reuse
from kvpool.index.sessions import EngineSession
from kvpool.keys import SCOPE_BYTES_MAX, is_scope
from kvpool.types import KEY_BYTES, ConnectionId, ReservationId, RetainState, SaveState

CHECKSUM_BYTES = 4
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Places:
    """A reservation as its holder sees it: u8 states, columns of u64 offsets and generations. Id 0: nothing to write.

    `retained`: a `RetainState` for each chunk where something was said of retention, else empty.
    """

    reservation: int
    states: bytes
    offsets: bytes
    generations: bytes
    retained: bytes


class Writing:
    """All writers of the daemon. `reservations_max` bounds the reservations of one connection."""

    def __init__(
        self, directory: kvpool_native.Directory, ttl_ns: int, reservations_max: int, reuse: Reuse | None = None
    ) -> None:
        self._directory = directory
        self._reuse = reuse
        self._reservations = Reservations(ttl_ns)
        self._reservations_max = reservations_max
        self.expired_reservations = 0

    def __repr__(self) -> str:
        return f"<Writing {self.reservations} reservations>"

    @property
    def reservations(self) -> int:
        """Reservations under way, expired ones whose writer has not been heard of included."""
        return len(self._reservations)

    def stats(self) -> dict[str, int]:
        """Counters, by name."""
        return {"reservations": self.reservations, "expired_reservations": self.expired_reservations}

    def reserve(
        self,
        session: EngineSession,
        parent: bytes,
        keys: bytes,
        now_ns: int,
        *,
        may_wait: bool,
        wishes: tuple[bytes, bytes] = (b"", b""),
    ) -> Places | None:
        """Slots for new chunks; None where only memory could serve that is still being faulted in or written down.

        `wishes`: priorities and durations to keep chunks with, new or present, or nothing; see `m.Reserve`. Raises Refused.
        """
        if self._reservations.count_of(session.connection) >= self._reservations_max:
            limit = self._reservations_max
            raise Refused("full", f"this connection has server.max_reservations = {limit} saves under way")
        failpoint.reach("daemon.reserve.before", failpoint.refused)
        own = session.own
        evicted_before = self._directory.stats()["evicted_chunks"] if failpoint.is_armed else 0
        reservation, states, offsets, generations = self._directory.reserve(
            own.id, own.size_class, parent, keys, now_ns
        )
        reserved = states.count(SaveState.RESERVED)
        if may_wait and SaveState.NOT_READY in states:
            self._directory.end_reservation(reservation, now_ns)
            return None
        if self._reuse is not None:
            self._reuse.note_save(keys, own.layout.chunk_bytes, now_ns)
        if reserved:
            layers = own.layout.layers
            self._reservations.add(
                ReservationId(reservation), session.connection, chunks=reserved, layers=layers, now_ns=now_ns
            )
        else:
            assert not reservation
        failpoint.reach("daemon.reserve.after", failpoint.refused)
        if failpoint.is_armed and self._directory.stats()["evicted_chunks"] > evicted_before:
            failpoint.reach("daemon.evict.after", failpoint.refused)
        retained = self._retain(own.id, keys, states, wishes, now_ns)
        return Places(reservation, states, offsets, generations, retained)

    def commit(
        self,
        session: EngineSession,
        reservation_id: int,
        checksums: bytes,
        tokens: bytes,
        now_ns: int,
        scope: bytes = b"",
    ) -> bytes:
        """Publish the next chunks of a reservation; a state for each. `tokens`: all their token ids, or none; `scope`: what
        is kept behind those of each.

        Raises ProtocolError for counts that do not fit.
        """
        chunk_checksum_bytes = CHECKSUM_BYTES * session.own.layout.layers
        count, rest = divmod(len(checksums), chunk_checksum_bytes)
        if rest or not count:
            raise ProtocolError(f"checksums have {len(checksums)} bytes, expected a multiple of {chunk_checksum_bytes}")
        tokens = _with_scope(tokens, scope, count, session.own.layout.chunk_tokens)
        reservation = self._reservations.find(ReservationId(reservation_id), session.connection)
        if reservation is None:
            return bytes([SaveState.EXPIRED]) * count
        if reservation.committed + count > reservation.chunks:
            raise ProtocolError(f"commit of {reservation.committed + count} chunks, {reservation.chunks} are reserved")
        if reservation.deadline_ns <= now_ns:
            self.expire(now_ns)
        if reservation.is_expired:
            return bytes([SaveState.EXPIRED]) * count
        failpoint.reach("daemon.commit.before_publish", failpoint.refused)
        states = self._directory.commit(reservation_id, reservation.committed, checksums, now_ns, tokens)
        reservation.committed += count
        if reservation.committed == reservation.chunks:
            self._end(reservation, now_ns)
        failpoint.reach("daemon.commit.after_publish", failpoint.refused)
        return states

    def end(self, session: EngineSession, reservation_id: int, now_ns: int) -> None:
        """Give up what was not committed; its writer has said that it writes no more."""
        failpoint.reach("daemon.end.before", failpoint.refused)
        reservation = self._reservations.find(ReservationId(reservation_id), session.connection)
        if reservation is not None:
            self._end(reservation, now_ns)

    def drop_owner(self, connection: ConnectionId, now_ns: int) -> None:
        """End every reservation of a connection."""
        for reservation in self._reservations.of_owner(connection):
            self._end(reservation, now_ns)

    def expire(self, now_ns: int) -> None:
        """Take what has outlived its time out of sight; its slots wait for their writer's word."""
        for reservation in self._reservations.expire(now_ns):
            self._directory.expire_reservation(reservation.id, now_ns)
            self.expired_reservations += 1

    def verify(self) -> list[str]:
        """Broken invariants, one line each."""
        return self._reservations.verify()

    def _retain(self, namespace: int, keys: bytes, states: bytes, wishes: tuple[bytes, bytes], now_ns: int) -> bytes:
        priorities, durations = wishes
        if not priorities:
            return b""
        kept = 0
        while kept < len(states) and states[kept] in (SaveState.PRESENT, SaveState.RESERVED):
            kept += 1
        if not kept:
            return bytes([RetainState.ABSENT]) * len(states)
        lasting = durations[: DURATION_BYTES * kept]
        answer = keep(self._directory, namespace, keys[: KEY_BYTES * kept], priorities[:kept], lasting, now_ns)
        return answer + bytes([RetainState.ABSENT]) * (len(states) - kept)

    def _end(self, reservation: Reservation, now_ns: int) -> None:
        self._directory.end_reservation(reservation.id, now_ns)
        self._reservations.end(reservation)


def _with_scope(tokens: bytes, scope: bytes, count: int, chunk_tokens: int) -> bytes:
    """The token ids of `count` chunks, the scope behind those of each. Raises ProtocolError where they do not fit."""
    chunk_bytes = TOKEN_BYTES * chunk_tokens
    if not is_scope(scope):
        raise ProtocolError(
            f"scope has {len(scope)} bytes, expected none or whole words, at most {SCOPE_BYTES_MAX} bytes"
        )
    if not tokens:
        return b""
    if len(tokens) != chunk_bytes * count or chunk_bytes + len(scope) > TOKEN_BYTES * kvpool_native.TOKEN_IDS_MAX:
        raise ProtocolError(f"tokens have {len(tokens)} bytes, expected none or {chunk_bytes * count}")
    if not scope:
        return tokens
    return b"".join(tokens[at : at + chunk_bytes] + scope for at in range(0, len(tokens), chunk_bytes))
