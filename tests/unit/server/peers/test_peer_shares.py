"""Tests of what other nodes may hold of this one: by key, whatever the number of connections, and all of them together."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvpool.clock import MonotonicClock
from kvpool.config.peer_options import PeerConfig
from kvpool.errors import Refused
from kvpool.ids import ConnectionId
from kvpool.index.namespaces import NAMESPACES_MAX
from kvpool.index.parts import Parts
from kvpool.index.sessions import EngineSession
from kvpool.key_column import KeyColumn
from kvpool.peers.control import records as r
from kvpool.peers.control.pullers import Puller
from kvpool.pool.chains import Chains
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool.protocol.reserve_runs import reserve_chain
from kvpool.server.descriptor_room import PeerRoom
from kvpool.server.peers.offers import Offers
from kvpool.server.peers.puller_connections import FIRST_PEER
from kvpool.tiering.peer_allowance import PeerAllowance
from tests.rigs.nodes.fleet import peer_config
from tests.rigs.nodes.peers import until
from tests.rigs.tiers.tiered_pool import CHUNK, LAYOUT, TieredPool, key_of

CHUNKS = 48
CHAIN = 6
# One node, of its half of what all nodes may have.
OF_ONE, OF_ALL = CHUNKS // 4, CHUNKS // 2


@dataclass
class Owner:
    """A node with full DRAM that others pull from; `offered`: chunks of each answered pull."""

    pool: TieredPool
    offers: Offers
    chains: list[list[bytes]]
    offered: list[int] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    async def pull(self, puller: Puller, pull: int, chain: int, *, model: str = "model") -> None:
        """A pull of a chain whose chunks are never received."""
        answered = asyncio.Event()

        def answer(found: r.Offer | r.Refused) -> bool:
            if isinstance(found, r.Refused):
                self.refused.append(found.text)
            else:
                self.offered.append(found.chunks)
            answered.set()
            return True

        keys = b"".join(self.chains[chain])
        self.offers.serve(puller, r.Pull(pull, model, list(LAYOUT.to_wire()), b"", 0, keys, 60_000, False), answer)
        await asyncio.wait_for(answered.wait(), 20.0)

    def leased_chunks(self) -> int:
        """Chunks that leases for other nodes protect."""
        holders = self.pool.pool._directory.holders()
        return sum(use.leased_bytes for use in holders if use.holder >= FIRST_PEER) // CHUNK


@asynccontextmanager
async def owner(config: PeerConfig | None = None) -> AsyncIterator[Owner]:
    """An owner that ends with nothing leased."""
    pool = TieredPool((), CHUNKS, "dram.connection_quota=0.5", levels=())
    await pool.start()
    loop = asyncio.get_running_loop()
    offers = Offers(pool.pool, config or peer_config(), MonotonicClock(), loop, room=PeerRoom())
    chains = [[key_of(chain, number) for number in range(CHAIN)] for chain in range(CHUNKS // CHAIN)]
    made = Owner(pool, offers, chains)
    for keys in chains:
        assert await pool.save(keys) == CHAIN
    yield made
    assert await offers.close()
    assert made.leased_chunks() == 0
    assert not made.pool.pool._directory.holders()
    await pool.stop()


def puller(number: int, peer: str) -> Puller:
    """A connection of a key."""
    return Puller(f"node-{number}", bytes(16), peer, number, peer)


@pytest.mark.asyncio
async def test_connections_of_one_key_lease_no_more_than_one() -> None:
    async with owner() as here:
        for number in range(8):
            await here.pull(puller(1 + number, "key"), 1, number)
        assert here.leased_chunks() == sum(here.offered) == OF_ONE, here.offered


@pytest.mark.asyncio
async def test_all_keys_together_leave_engines_their_part() -> None:
    async with owner() as here:
        for number in range(8):
            await here.pull(puller(1 + number, f"key-{number}"), 1, number)
        assert OF_ONE < here.leased_chunks() <= OF_ALL, here.offered
        leased = await here.pool.serve(here.pool.pool.chains.acquire(here.pool.session, m.Acquire(here.chains[7][0])))
        assert leased.chunks == 1, "an engine has room beside all of them"
        here.pool.pool.leases.release(here.pool.session, leased.lease)


@pytest.mark.asyncio
async def test_a_key_that_has_left_counts_no_longer_and_may_come_again() -> None:
    async with owner() as here:
        for life in range(3):
            one, other = puller(10 * life + 1, "key"), puller(10 * life + 2, "key")
            await here.pull(one, 1, 0)
            await here.pull(other, 1, 1)
            assert here.leased_chunks() == OF_ONE
            here.offers.forget(one)
            await here.pool.until_moved(lambda: here.leased_chunks() == CHAIN)
            await here.pull(other, 2, 2)
            assert here.leased_chunks() == OF_ONE, "the other connection counts as before"
            here.offers.forget(other)
            await here.pool.until_moved(lambda: here.leased_chunks() == 0)
        assert not here.offers._connections._peers
        assert not here.offers._connections._connected


@pytest.mark.asyncio
async def test_connections_of_one_key_have_a_quarter_of_the_offers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.server.peers.offers.OFFERS_MAX", 8)
    async with owner() as here:
        for number in range(4):
            await here.pull(puller(1 + number, "key"), 1, 0)
        assert here.offered == [CHAIN, CHAIN]
        assert len(here.refused) == 2
        await here.pull(puller(9, "other key"), 1, 0)
        assert here.offered[-1] == CHAIN


@pytest.mark.asyncio
async def test_one_key_is_offered_what_fits_and_a_refusal_names_the_option() -> None:
    async with owner(peer_config(offered=(CHAIN + 2) * CHUNK)) as here:
        for number in range(3):
            await here.pull(puller(1 + number, "key"), 1, number)
        assert here.offered == [CHAIN, 2]
        assert here.refused == [f"the node is offered as much as peer.offered allows, {(CHAIN + 2) * CHUNK} bytes"]
        await here.pull(puller(9, "other key"), 1, 0)
        assert here.offered[-1] == CHAIN
        here.offers.release(puller(1, "key"), 1)
        await here.pool.until_moved(lambda: here.offers.stats()["offers"] == 2)
        await here.pull(puller(4, "key"), 1, 2)
        assert here.offered[-1] == CHAIN


@pytest.mark.asyncio
async def test_one_chunk_is_offered_in_any_case() -> None:
    async with owner(peer_config(offered=CHUNK // 2)) as here:
        await here.pull(puller(1, "key"), 1, 0)
        await here.pull(puller(2, "key"), 1, 1)
        assert here.offered == [1]
        assert len(here.refused) == 1


@pytest.mark.asyncio
async def test_what_other_leases_of_the_key_keep_back_is_waited_for_and_refused_not_declined() -> None:
    async with owner() as here:
        for number in range(3):
            await here.pull(puller(1 + number, "key"), 1, number)
        assert here.offered == [CHAIN, CHAIN]
        assert here.refused == ["other nodes lease as much as peer.leased_quota and dram.connection_quota allow"]
        waiting = asyncio.create_task(here.pull(puller(4, "key"), 1, 3))
        await asyncio.sleep(0)
        here.offers.release(puller(1, "key"), 1)
        await waiting
        assert here.offered == [CHAIN] * 3


@pytest.mark.asyncio
async def test_pulls_that_are_kept_back_do_not_wake_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with owner() as here:
        for number in range(2):
            await here.pull(puller(1 + number, "key"), 1, number)
        acquire, asked = type(here.pool.pool.chains).acquire_for_peer, []

        def note(chains: Chains, session: EngineSession, keys: KeyColumn, first: int) -> Parts[m.Leased]:
            asked.append(keys)
            return acquire(chains, session, keys, first)

        monkeypatch.setattr(type(here.pool.pool.chains), "acquire_for_peer", note)
        await asyncio.gather(*(here.pull(puller(3 + number, "key"), 1, 2 + number) for number in range(2)))
        assert len(here.refused) == 2
        assert len(asked) <= 4, "at most once at the beginning and once at the end of its time"


@pytest.mark.asyncio
async def test_a_lease_that_cannot_be_released_leaves_the_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with owner() as here:
        one = puller(1, "key")
        await here.pull(one, 1, 0)
        await here.pull(one, 2, 1)
        release: Callable[[EngineSession, int], object] = here.pool.pool.leases.release
        failed: list[int] = []

        def fail_once(session: EngineSession, lease: int) -> object:
            if not failed:
                failed.append(lease)
                raise Refused("failpoint", "daemon.release.before")
            return release(session, lease)

        monkeypatch.setattr(type(here.pool.pool.leases), "release", lambda _, *args: fail_once(*args))
        here.offers.release(one, 1)
        await here.pool.until_moved(lambda: here.offers.stats()["offers"] == 1)
        assert here.leased_chunks() == 2 * CHAIN, "as an engine's lease, it ends by its time, or with its session"
        here.offers.release(one, 2)
        await here.pool.until_moved(lambda: here.leased_chunks() == 0)


@pytest.mark.asyncio
async def test_a_model_is_in_use_by_other_nodes_only_while_they_pull_it() -> None:
    async with owner() as here:
        namespaces, one = here.pool.pool.namespaces, puller(1, "key")
        here.pool.pool.open_session(ConnectionId(7), "no longer served", LAYOUT)
        here.pool.pool.drop_connection(ConnectionId(7))
        await here.pull(one, 1, 0)
        await here.pull(one, 2, 0, model="no longer served")
        assert here.offered == [CHAIN, 0]
        assert namespaces.has_room_for(NAMESPACES_MAX - 1), "the one without chunks is given back"
        assert namespaces.find("no longer served", LAYOUT) is None
        here.pool.pool.drop_connection(here.pool.session.connection)
        await here.pool.flush()
        assert not namespaces.has_room_for(NAMESPACES_MAX), "the other one is being pulled"
        here.offers.release(one, 1)
        await here.pool.until_moved(lambda: here.offers.stats()["offers"] == 0)
        await here.pool.flush()
        assert namespaces.has_room_for(NAMESPACES_MAX)
        here.pool.assert_sound()


def test_a_chunk_beyond_the_bound_is_read_alone() -> None:
    allowance, one, other = PeerAllowance(CHUNK // 2), ConnectionId(1), ConnectionId(2)
    assert allowance.chunks(one, CHUNK) == 1
    allowance.take_bytes(one, CHUNK)
    assert allowance.chunks(one, CHUNK) == allowance.chunks(other, CHUNK) == 0
    allowance.give_back(one, CHUNK)
    assert allowance.chunks(other, CHUNK) == 1


def test_one_node_has_a_part_of_the_reads_for_others() -> None:
    one, other = ConnectionId(1), ConnectionId(2)
    allowance = PeerAllowance(16 * CHUNK)
    assert allowance.chunks(one, CHUNK) == 12
    allowance.take_bytes(one, 12 * CHUNK)
    assert allowance.chunks(one, CHUNK) == 0
    assert allowance.chunks(other, CHUNK) == 3
    allowance.take_bytes(other, 3 * CHUNK)
    allowance.give_back(one, 12 * CHUNK)
    assert allowance.chunks(one, CHUNK) == 9
    allowance.give_back(other, 3 * CHUNK)
    assert allowance.taken == 0


class Deaf:
    """Takes what is reported of saves."""

    def note_save(self, keys: KeyColumn) -> None:
        """Chunks that can be followed."""

    def end_save(self, keys: KeyColumn, stored: int) -> None:
        """A save has ended."""


@pytest.mark.asyncio
async def test_followers_of_slow_saves_leave_a_thread_to_pulls_of_what_is_there() -> None:
    async with owner(peer_config(threads=3)) as made:
        chains, session = made.pool.pool.chains, made.pool.session
        chains.writers.followed.listen(Deaf())
        saved = [key_of(99, number) for number in range(4)]
        made.chains.append(saved)
        reserved = await made.pool.serve(chains.reserve(session, reserve_chain(b"", b"".join(saved))))
        sums = np.zeros((len(saved), 1), "<u4").tobytes()
        chains.land_saved(session, one_way.LandSaved(reserved.reservation, 0, sums))
        for number in range(4):
            await made.pull(puller(number, f"peer {number}"), 1, len(made.chains) - 1)
        assert made.offered == [4, 4, 0, 0], "two of three threads may wait for the engine"
        await made.pull(puller(7, "peer 7"), 1, 7)
        made.offers.release(puller(0, "peer 0"), 1)
        await until(lambda: made.offers.stats()["offers"] == 2, "one of the followers has ended")
        await made.pull(puller(8, "peer 8"), 1, len(made.chains) - 1)
        assert made.offered[4:] == [CHAIN, 4]
        for number in (1, 7, 8):
            made.offers.release(puller(number, f"peer {number}"), 1)
        await made.pool.serve(chains.end_reservation(session, reserved.reservation))
