"""List of peers that operators see: the state of each, pages, and no more than a frame holds."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvpool.clock import MonotonicClock
from kvpool.errors import InvalidArgument
from kvpool.peers.circuit_breaker import FAILURES
from kvpool.peers.control.identity import PeerLife
from kvpool.peers.control.link import PeerLink
from kvpool.peers.following.followers import Followers
from kvpool.peers.link_state import LinkState
from kvpool.peers.members.member import Member
from kvpool.protocol import frames
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import peers as pm
from kvpool.server.peers.peer_list import ROWS_MAX, PeerVerbs, describe, name_of, peer_rows
from kvpool.tiers.peer.node_records import NodeRecord, NodeRecords
from kvpool_tools.sim.pool import VirtualClock

LIFE = PeerLife("other", bytes(range(16)), "tcp://127.0.0.1:2", is_new=False)
RECORDS = NodeRecords(VirtualClock(), random.Random(1))


def link_of(
    life: PeerLife | None = LIFE, fault: str = "", state: LinkState = LinkState.READY, port: int = 1, **further: Any
) -> PeerLink:
    named = {"last_life": life, "away_s": None, **further}
    member = Member(f"tcp://127.0.0.1:{port}")
    return cast(PeerLink, SimpleNamespace(life=life, fault=fault, state=state, member=member, rtt_s=0.0002, **named))


def followers_of(*, is_current: bool = True, fault: str = "") -> Followers:
    return cast(
        Followers, SimpleNamespace(is_current=lambda _: is_current, fault_of=lambda _: fault, known_of=lambda _: 7)
    )


def suspended() -> NodeRecord:
    record = RECORDS.of("suspended")
    permit = record.breaker.ask_permit()
    for _ in range(FAILURES):
        if permit is not None:
            record.breaker.fail(permit)
    record.fail("stalled", is_first=True)
    return record


def deferred() -> NodeRecord:
    record = RECORDS.of("deferred")
    record.fail("had none of 2 chunks", is_first=True)
    record.defer(MonotonicClock())
    return record


def no_record() -> None:
    """Of a node that was never asked."""


@pytest.mark.parametrize(
    ("link", "followers", "record", "expected"),
    [
        (link_of(), followers_of(), no_record, ("following", "", "")),
        (link_of(), followers_of(fault="it was late once"), no_record, ("following", "", "it was late once")),
        (link_of(), followers_of(is_current=False), no_record, ("snapshot", "", "")),
        (link_of(), followers_of(is_current=False, fault="a gap"), no_record, ("waiting", "", "a gap")),
        (link_of(), followers_of(), suspended, ("suspended", "", "stalled")),
        (link_of(), followers_of(), deferred, ("deferred", "", "had none of 2 chunks")),
        (link_of(None, state=LinkState.CONNECTING), followers_of(), no_record, ("connecting", "", "")),
        (link_of(None, "the connection ended"), followers_of(), no_record, ("away", "", "the connection ended")),
        (
            link_of(None, "it is no member", state=LinkState.CLOSED, last_life=LIFE),
            followers_of(),
            no_record,
            ("left", "", "it is no member"),
        ),
        (
            link_of(None, "refused: domain: other secrets"),
            followers_of(),
            no_record,
            ("refused", "domain", "refused: domain: other secrets"),
        ),
    ],
)
def test_each_state_has_its_word(
    link: PeerLink, followers: Followers, record: Callable[[], NodeRecord | None], expected: tuple[str, str, str]
) -> None:
    row = describe(link, followers, record())
    assert (row["state"], row["code"], row["last_error"]) == expected
    assert (row["retry_s"] > 0) == (row["state"] in ("suspended", "deferred"))


def test_a_row_has_what_was_measured() -> None:
    record = RECORDS.of("measured")
    unmeasured = describe(link_of(), followers_of(), None)
    assert (unmeasured["bytes_per_s"], unmeasured["latency_us"]) == (None, None)
    record.pulls = 1
    asked = describe(link_of(), followers_of(), record)
    assert (asked["bytes_per_s"], asked["latency_us"]) == (None, None)
    record.pace.note_answer(0.009)
    answered = describe(link_of(), followers_of(), record)
    assert answered["bytes_per_s"] is None, "nothing has come"
    assert answered["latency_us"] is not None
    record.pulls, record.read_bytes = 3, 1000
    row = describe(link_of(), followers_of(), record)
    assert row["latency_us"] == pytest.approx(2000, rel=0.01)
    assert row["bytes_per_s"] == pytest.approx(1e9, rel=0.01)
    assert (row["node"], row["life"], row["known_chunks"]) == ("other", LIFE.incarnation.hex(), 7)
    assert (row["pulls"], row["failures"], row["read_bytes"], row["ping_us"]) == (3, 0, 1000, 200)


def test_a_node_that_is_away_has_its_name_and_what_was_counted() -> None:
    record = RECORDS.of("other")
    record.pulls, record.failures, record.read_bytes = 7, 2, 4096
    link = link_of(None, "the connection ended", last_life=LIFE, away_s=3.5)
    assert name_of(link) == "other"
    row = describe(link, followers_of(), record)
    assert (row["node"], row["state"], row["life"], row["away_s"]) == ("other", "away", LIFE.incarnation.hex(), 3.5)
    assert (row["pulls"], row["failures"], row["read_bytes"], row["known_chunks"]) == (7, 2, 4096, 7)


class _Many:
    """A fleet of many members, each with the longest texts."""

    def here(self) -> dict[str, Any]:
        return {"node": "here", "listen": "tcp://127.0.0.1:1"}

    def fleet_problems(self) -> list[str]:
        return ["x" * 5000]

    def former_links(self) -> list[PeerLink]:
        return [link_of(None, "x" * 5000, state=LinkState.CLOSED, port=999, last_life=LIFE)]

    def peer_links(self) -> list[PeerLink]:
        life = PeerLife("é" * 128, bytes(16), "", is_new=False)
        return [link_of(life, "x" * 5000, port=port) for port in range(1000, 1000 + 2 * ROWS_MAX + 5)]

    def peer_row(self, link: PeerLink) -> dict[str, Any]:
        return describe(link, followers_of(), suspended())


def test_pages_fit_frames_and_have_every_member_once() -> None:
    verbs = PeerVerbs([_Many()])
    rows: list[dict[str, Any]] = []
    while page := verbs.list_peers(pm.AskPeers(len(rows))):
        # What the other side decodes.
        body = m.encode(page, 1)[4:]
        frames.decode(body)
        if not page.values["peers"]:
            break
        rows += page.values["peers"]
    assert len(rows) == len({row["address"] for row in rows}) == 2 * ROWS_MAX + 6
    assert page.values["members"] == 2 * ROWS_MAX + 5
    assert len(peer_rows([_Many()])) == 2 * ROWS_MAX + 5, "without those that have left"
    with pytest.raises(InvalidArgument, match="first is -1"):
        verbs.list_peers(pm.AskPeers(-1))
