"""Near offers: where the chunks of offers are in this node's memory, for daemons of the same host (docs/peer-protocol.md).

Who asks over the control plane learns no more than the places of what was leased for it; the memory itself it gets from the
unix socket, with the rights that the kernel gives it there. Loop thread only. Invariant: `_columns` has the offers that have
not ended.
"""

from dataclasses import dataclass, field

from kvpool.peers.control import records as r

Columns = tuple[bytes, bytes, bytes]


@dataclass(slots=True)
class NearOffers:
    """See the module. `host`: the tag of this host; `socket`: that hands out the memory of this `epoch`. `given`: offers whose
    places were given."""

    host: bytes
    socket: str
    epoch: bytes
    given: int = 0
    _columns: dict[int, Columns] = field(default_factory=dict)

    def add_offer(self, number: int, columns: Columns) -> None:
        """An offer; `columns`: arena offsets, slots and generations of its chunks, u64."""
        self._columns[number] = columns

    def drop(self, number: int) -> None:
        """An offer has ended."""
        del self._columns[number]

    def answer(self, number: int | None, ask: r.AskNear) -> r.Near | r.Refused:
        """Where the chunks of an offer are."""
        if ask.host != self.host:
            return r.Refused(r.RefusalCode.TRANSPORT, "this node is on another host")
        columns = None if number is None else self._columns.get(number)
        if columns is None:
            return r.Refused(r.RefusalCode.FAILED, f"pull {ask.pull} has no offer, or it has ended")
        self.given += 1
        return r.Near(ask.pull, self.socket, self.epoch, *columns)
