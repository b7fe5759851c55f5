"""Set hold: a lease on chunks of one group that are each alone, by the keys that were named.

Its answer has a row for each key, one without a slot for what is not leased. Any thread, as `LeaseHold`.
"""

import numpy as np
import numpy.typing as npt

from kvpool.errors import ProtocolError
from kvpool.key_column import KeyColumn
from kvpool.protocol.records import messages as m
from kvpool_client.connection.session import Session
from kvpool_client.key_chain import Namespace
from kvpool_client.verbs.lease import LeaseHold
from kvpool_client.verbs.leased_rows import LeasedRows

_ABSENT = -1


class SetHold(LeaseHold):
    """See the module. `group`: whose chunks they are; `count`: keys that were named, of which `chunks` are leased, those named
    twice counted twice."""

    def __init__(
        self,
        session: Session | None,
        leased: m.Leased,
        keys: KeyColumn,
        *,
        group: int,
        namespace: Namespace,
        asked_ns: int,
    ) -> None:
        """`keys`: of the first rank. REQUIRES: a level for each of them."""
        super().__init__(session, leased, namespace=namespace, asked_ns=asked_ns)
        self.group = group
        self.count = len(keys)
        rows = np.frombuffer(leased.tiers, np.uint8) != m.NO_LEVEL
        self._sources = np.where(rows, np.arange(self.count), _ABSENT)  # whose row each key has
        if rows.any() and not rows.all():  # a key that was named before has none of its own
            first = {keys[place]: place for place in np.flatnonzero(rows).tolist()}
            for place in np.flatnonzero(~rows).tolist():
                self._sources[place] = first.get(keys[place], _ABSENT)
        self.chunks = int(np.count_nonzero(self._sources != _ABSENT))
        self.tokens = self.chunks * self.layout.chunk_tokens
        # The daemon numbers what it has leased: backwards in a full group, whose first chunk is used last.
        numbers = np.cumsum(rows) - 1
        self._numbers = leased.chunks - 1 - numbers if self.layout.group_layouts[group].is_chained else numbers

    @property
    def held(self) -> npt.NDArray[np.bool_]:
        """Which of the keys are leased."""
        found: npt.NDArray[np.bool_] = self._sources != _ABSENT
        return found

    @property
    def ranges(self) -> tuple[range, ...]:
        """The chunks of its own group, none of the others."""
        groups = range(len(self.layout.group_layouts))
        return tuple(range(self.chunks if group == self.group else 0) for group in groups)

    @property
    def row_tiers(self) -> bytes:
        """The level of each leased key."""
        return self.tiers.tobytes()

    @property
    def tiers(self) -> npt.NDArray[np.uint8]:
        """The same."""
        return np.frombuffer(self.leased.tiers, np.uint8)[self._sources[self.held]]

    @property
    def held_rows(self) -> LeasedRows:
        """The rows of the leased keys, in their order."""
        return self.rows_of(self.held)

    def rows_of(self, wanted: npt.NDArray[np.bool_]) -> LeasedRows:
        """The rows of some of the keys, all of which are leased."""
        places = self._sources[wanted]
        return LeasedRows.chosen(self.leased, places, self._numbers[places].tolist())


def check_set_answer(leased: m.Leased, count: int) -> None:
    """Check the answer to a set of so many keys. Raises ProtocolError."""
    held = count - leased.tiers.count(m.NO_LEVEL)
    if len(leased.tiers) != count or leased.chunks != held:
        raise ProtocolError(
            f"a lease of a set of {count} keys has {len(leased.tiers)} levels and {leased.chunks} chunks, {held} of which "
            "have a level"
        )
