"""Set load: leased chunks that are each alone on their way into engine memory. One that fails takes no other along.

Its result says of each key whether it is in place. Threads as of `Load`.
"""

import numpy as np
import numpy.typing as npt

from kvpool.states import LoadReason
from kvpool_client.verbs.load import BegunLoad, Load
from kvpool_client.verbs.results import LoadResult

_COMPLETE, _UNDECIDED = int(LoadReason.COMPLETE), int(LoadReason.CANCELLED)
_WORDS = {int(reason): reason.name.lower() for reason in LoadReason}
_ABSENT, _SKIPPED = "absent", "skipped"


class SetLoad(Load):
    """See the module; `Pool.load_set` answers it. `chunks_so_far` and its result count the chunks that are in place."""

    def __init__(self, begun: BegunLoad, held: npt.NDArray[np.bool_], wanted: npt.NDArray[np.bool_]) -> None:
        """`held`: which of the keys are leased; `wanted`: which of these are in the run, the others are left out."""
        super().__init__(begun)
        self._held = held
        self._wanted = wanted

    @property
    def chunks_so_far(self) -> int:
        """Chunks that have not failed yet; of an ended load those that are in place."""
        if self._result is not None:
            return self._result.chunks
        return 0 if self._is_inherited else sum(code in (_COMPLETE, _UNDECIDED) for code in self._reasons())

    def wait_layer(self, layer: int, timeout_s: float | None = None, group: int | None = None) -> bool:
        """Wait until layer `layer` of every chunk that is loaded is in place and its checksums were good. False: one has
        failed, or the load has ended before. See `Load.wait_layer`."""
        is_there = super().wait_layer(layer, timeout_s, group)
        return is_there and all(code in (_COMPLETE, _UNDECIDED) for code in self._reasons())

    def loaded_levels(self) -> bytes:
        """See `Load`."""
        good = np.frombuffer(self._reasons(), np.uint8) == _COMPLETE
        (loaded,) = self.runs
        levels: npt.NDArray[np.uint8] = loaded.rows.tiers[good]
        return levels.tobytes()

    def corrupt_places(self) -> list[tuple[int, int]]:
        """See `Load`; once for a chunk that several keys name."""
        (loaded,) = self.runs
        rows = [row for row, code in enumerate(self._reasons()) if code == LoadReason.CHECKSUM]
        return list(dict.fromkeys(map(loaded.rows.place_of, rows)))

    def _reasons(self) -> bytes:
        """A code for each key that is loaded."""
        (loaded,) = self.runs
        if loaded.run is None:
            return bytes([loaded.reason]) * len(loaded.rows)
        stopped = loaded.reason if loaded.reason != LoadReason.COMPLETE else LoadReason.CANCELLED
        return loaded.run.reasons().replace(bytes([_UNDECIDED]), bytes([stopped]))

    def _end(self) -> LoadResult:
        result = self._counted(self._reasons())
        self._result = result
        self._begun.on_end(self, result)
        return result

    def _finish(self) -> LoadResult:
        if self._result is None and self._is_inherited:
            (loaded,) = self.runs
            self._result = self._counted(bytes([LoadReason.DISCONNECTED]) * len(loaded.rows))
        return super()._finish()

    def _counted(self, codes: bytes) -> LoadResult:
        left = iter(codes)
        asked = zip(self._held.tolist(), self._wanted.tolist(), strict=True)
        states = tuple(
            [_WORDS[next(left)] if is_wanted else _SKIPPED if is_held else _ABSENT for is_held, is_wanted in asked]
        )
        reason = next((code for code in codes if code != _COMPLETE), _COMPLETE)
        good = codes.count(_COMPLETE)
        return LoadResult(good, good * self._begun.chunk_tokens, _WORDS[reason], states=states)
