"""Save through staging memory: announced layers are gathered into windows, and the daemon copies them from there.

    announced ──gathered into a window──► the daemon copies it into the slots ──answered──► settled

While the daemon copies one window, the client fills the next. A save of any size goes through an area of any size, piece by
piece, each of as many layers and chunks as fit a window. Has the methods of `save.SaveRun`.

Threads: the run's own, and any that waits. `_changed` guards all mutable state and is not held while bytes move or a request
is under way.
"""

import threading
from collections import deque
from dataclasses import dataclass

from kvpool.errors import KVPoolError
from kvpool.ids import CHECKSUM_BYTES
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import staging as sm
from kvpool_client.connection.session import Session
from kvpool_client.copying.gather import Gatherer, Gathering, Piece
from kvpool_client.copying.staging_memory import StagingArea

WAIT_SLICE_S = 0.05


@dataclass(frozen=True, slots=True)
class _Window:
    """A piece being gathered, and where."""

    piece: Piece
    offset: int
    gathering: Gathering


class StagedSave:
    """The run of one save through staging.

    Invariant: `_settled` extents have been copied by the daemon. The next piece to gather begins with chunk `_next_chunk` of
    the layer at `_position` of `_announced`, and everything before it is settled or under way.
    """

    def __init__(
        self,
        session: Session,
        area: StagingArea,
        gatherer: Gatherer,
        *,
        layer_bytes: int,
        extents: range,
        reserved: tuple[int, int],
        chunks: int,
    ) -> None:
        """Of the `chunks` reserved chunks of a run, `reserved` (a reservation and the run's number): what the gatherer counts
        as layers from 0 on goes to these extents of each. Begins when a layer is announced."""
        self._session = session
        self._reservation, self._run_number = reserved
        self._area = area
        self._gatherer = gatherer
        self._layer_bytes = layer_bytes
        self._first_extent = extents.start
        self._layers = len(extents)
        self._chunks = chunks
        self._changed = threading.Condition()
        self._announced: list[int] = []  # guarded by _changed
        self._position = 0  # guarded by _changed
        self._next_chunk = 0  # guarded by _changed
        self._settled = 0  # guarded by _changed
        self._gathering: Gathering | None = None  # guarded by _changed
        self._is_cancelled = False  # guarded by _changed
        self._checksums = bytearray(chunks * len(extents) * CHECKSUM_BYTES)  # the run's thread writes it
        self._thread = threading.Thread(target=self._run, name="kvpool-staged-save", daemon=True)
        self._thread.start()

    def announce(self, layer: int) -> bool:
        """Copy this layer from now on; False if it was announced before."""
        with self._changed:
            if layer in self._announced:
                return False
        self._gatherer.announce(layer)
        with self._changed:
            self._announced.append(layer)
            self._changed.notify_all()
        return True

    def announce_all(self) -> None:
        """Copy every layer that was not announced."""
        with self._changed:
            missing = [layer for layer in range(self._layers) if layer not in self._announced]
        for layer in missing:
            self._gatherer.announce(layer)
        with self._changed:
            self._announced += missing
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Whether the daemon has copied everything announced, or the save was cancelled, within the time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._is_cancelled or self._settled == len(self._announced) * self._chunks, timeout_s
            )

    def is_cancelled(self) -> bool:
        """Whether the save was cancelled, or the daemon refused."""
        with self._changed:
            return self._is_cancelled

    def progress(self) -> int:
        """Extents gathered and copied; rises while the save makes progress."""
        with self._changed:
            return self._settled + (self._gathering.progress() if self._gathering is not None else 0)

    def checksums(self) -> bytes:
        """CRC-32C of every layer of every chunk as it was gathered."""
        return bytes(self._checksums)

    def copied_extents(self) -> int:
        """None: the daemon itself knows which extents it has copied."""
        return 0

    def checksums_from(self, layer: int) -> bytes:  # noqa: ARG002 - the interface of a run
        """None, as `copied_extents`."""
        return b""

    def cancel(self) -> None:
        """End the save; when it has returned, it reads no engine memory."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        under_way: deque[_Window] = deque()
        try:
            while under_way or not self._has_ended():
                # The next window is filled while the daemon copies this one.
                if (window := self._begin_next(is_alone=not under_way)) is not None:
                    under_way.append(window)
                if len(under_way) > 1 or (under_way and window is None):
                    self._hand_over(under_way.popleft())
        except (KVPoolError, ValueError):  # the daemon is away or refuses: nothing is published
            with self._changed:
                self._is_cancelled = True
        for window in under_way:
            window.gathering.cancel()
            self._area.give_back(window.offset)
        with self._changed:
            self._changed.notify_all()

    def _begin_next(self, *, is_alone: bool) -> _Window | None:
        """Start to fill a window with the next piece; None where there is no piece, or no free window. Waits if alone."""
        with self._changed:
            if is_alone:
                self._changed.wait_for(lambda: self._is_cancelled or self._is_settled() or self._has_next())
            if self._is_cancelled or not self._has_next():
                return None
        offset = self._area.take_window(WAIT_SLICE_S if is_alone else 0.0)
        if offset is None:
            return None
        with self._changed:
            piece = self._next_piece()
        try:
            gathering = self._gatherer.begin_piece(piece, offset)
        except BaseException:
            self._area.give_back(offset)
            raise
        with self._changed:
            self._gathering = gathering
        return _Window(piece, offset, gathering)

    def _hand_over(self, window: _Window) -> None:
        """Have the daemon copy a window once it is filled."""
        piece, gathering = window.piece, window.gathering
        try:
            while not gathering.wait(WAIT_SLICE_S) and not self.is_cancelled():
                pass
            if self.is_cancelled() or gathering.is_cancelled():
                with self._changed:
                    self._is_cancelled = True
                return
            first = self._first_extent + piece.first_layer
            request = sm.CopyStaged(
                self._reservation,
                piece.first_chunk,
                piece.chunks,
                first,
                piece.layers,
                window.offset,
                self._run_number,
            )
            self._session.call(request, m.Done)
            self._note(piece, gathering.checksums())
        finally:
            gathering.cancel()
            self._area.give_back(window.offset)

    def _note(self, piece: Piece, checksums: bytes) -> None:
        row = piece.layers * CHECKSUM_BYTES
        for number in range(piece.chunks):
            at = ((piece.first_chunk + number) * self._layers + piece.first_layer) * CHECKSUM_BYTES
            self._checksums[at : at + row] = checksums[number * row : (number + 1) * row]
        with self._changed:
            self._settled += piece.extents
            self._changed.notify_all()

    def _has_ended(self) -> bool:
        with self._changed:
            return self._is_cancelled or self._is_settled()

    def _is_settled(self) -> bool:
        return self._settled == self._layers * self._chunks

    def _has_next(self) -> bool:
        return self._position < len(self._announced)

    def _next_piece(self) -> Piece:
        """The next piece: layers announced one after the other, of all chunks, or some chunks of one layer."""
        fitting = min(self._area.window_bytes // self._layer_bytes, sm.COPIED_EXTENTS_MAX)
        first_layer, first_chunk = self._announced[self._position], self._next_chunk
        layers = 1
        while (
            not first_chunk
            and (layers + 1) * self._chunks <= fitting
            and self._announced[self._position + layers : self._position + layers + 1] == [first_layer + layers]
        ):
            layers += 1
        chunks = min(fitting, self._chunks - first_chunk)
        self._next_chunk += chunks
        if self._next_chunk == self._chunks:
            self._next_chunk = 0
            self._position += layers
        return Piece(first_chunk, chunks, first_layer, layers)
