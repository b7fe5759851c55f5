"""Reports of clients about the extents of a save: only its own, whole columns, in range, and nothing where nobody listens."""

import numpy as np
import pytest

from kvpool.errors import ProtocolError
from kvpool.ids import ConnectionId
from kvpool.key_column import KeyColumn
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.protocol.reserve_runs import reserve_chain
from kvpool.states import SaveState
from tests.rigs.parts import served
from tests.rigs.tiers.tiered_pool import LAYOUT, TieredPool, key_of

KEYS = [key_of(3, number) for number in range(4)]


class Listener:
    def __init__(self) -> None:
        self.noted: list[bytes] = []
        self.ended: list[tuple[int, int]] = []

    def note_save(self, keys: KeyColumn) -> None:
        self.noted += list(keys)

    def end_save(self, keys: KeyColumn, stored: int) -> None:
        self.ended.append((len(keys), stored))


def sums_of(extents: int, chunks: int = len(KEYS)) -> bytes:
    return np.arange(extents * chunks, dtype="<u4").tobytes()


@pytest.mark.asyncio
async def test_only_extents_of_an_own_save_are_noted() -> None:
    rig = TieredPool((), 48, levels=())
    await rig.start()
    chains, followed, listener = rig.pool.chains, rig.pool.chains.writers.followed, Listener()
    followed.listen(listener)
    made = await rig.serve(chains.reserve(rig.session, reserve_chain(b"", b"".join(KEYS))))
    other = rig.pool.open_session(ConnectionId(2), "model", LAYOUT)
    served(chains.land_saved(other, one_way.LandSaved(made.reservation, 0, sums_of(1))))
    served(chains.land_saved(rig.session, one_way.LandSaved(made.reservation + 7, 0, sums_of(1))))
    assert listener.noted == []
    for first_extent, sums in (
        (0, b""),
        (0, bytes(3)),
        (0, sums_of(1)[:-4]),
        (1, sums_of(2)),
        (-1, sums_of(1)),
        (2, sums_of(1)),
    ):
        with pytest.raises(ProtocolError, match="extent"):
            served(chains.land_saved(rig.session, one_way.LandSaved(made.reservation, first_extent, sums)))
    served(chains.land_saved(rig.session, one_way.LandSaved(made.reservation, 1, sums_of(1))))
    assert listener.noted == [], "its first extent has not landed"
    served(chains.land_saved(rig.session, one_way.LandSaved(made.reservation, 0, sums_of(1))))
    served(chains.land_saved(rig.session, one_way.LandSaved(made.reservation, 0, sums_of(1))))
    assert listener.noted == KEYS
    rig.assert_sound()
    rig.pool.drop_connection(ConnectionId(2))
    await rig.serve(chains.end_reservation(rig.session, made.reservation))
    assert listener.ended == [(len(KEYS), 0)]
    served(chains.land_saved(rig.session, one_way.LandSaved(made.reservation, 0, sums_of(1))))
    await rig.stop()


@pytest.mark.asyncio
async def test_a_chunk_whose_landed_extents_were_written_anew_is_not_stored() -> None:
    rig = TieredPool((), 48, levels=())
    await rig.start()
    chains, listener = rig.pool.chains, Listener()
    chains.writers.followed.listen(listener)
    made = await rig.serve(chains.reserve(rig.session, reserve_chain(b"", b"".join(KEYS))))
    served(chains.land_saved(rig.session, one_way.LandSaved(made.reservation, 0, sums_of(1))))
    sums = np.frombuffer(sums_of(2), "<u4").reshape(len(KEYS), 2).copy()
    sums[:, 0] = np.arange(len(KEYS))
    sums[2, 0] += 1
    done = await rig.serve(chains.commit(rig.session, m.Commit(made.reservation, sums.tobytes(), b"")))
    assert [SaveState(state).name for state in done.states] == ["STORED", "STORED", "CHECKSUM", "NO_PARENT"]
    assert listener.ended == [(len(KEYS), 2)], "the others are lost"
    rig.assert_sound()
    await rig.stop()


@pytest.mark.asyncio
async def test_saves_begun_before_anybody_listens_are_not_noted() -> None:
    rig = TieredPool((), 48, levels=())
    await rig.start()
    chains, listener = rig.pool.chains, Listener()
    made = await rig.serve(chains.reserve(rig.session, reserve_chain(b"", b"".join(KEYS))))
    chains.writers.followed.listen(listener)
    served(chains.land_saved(rig.session, one_way.LandSaved(made.reservation, 0, sums_of(1))))
    await rig.serve(chains.end_reservation(rig.session, made.reservation))
    assert (listener.noted, listener.ended) == ([], [])
    assert await rig.save(KEYS) == len(KEYS)
    assert listener.noted == []
    await rig.stop()
