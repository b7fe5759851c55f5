"""Control server and client: the exchange between two nodes, over real sockets."""

import contextlib
from dataclasses import astuple, replace

import pytest
import zmq

from kvpool.config.addresses import ZmqAddress
from kvpool.errors import ConfigError, PeerNotAsked, PeerUnreachable, Refused
from kvpool.peers.control import records as r
from kvpool.peers.control import server as server_module
from kvpool.peers.control.link import LinkSettings
from kvpool.peers.control.server import ControlServerSettings
from kvpool.peers.link_state import LinkState
from kvpool.peers.members.member import Member, MembersChange
from tests.rigs.nodes.peers import (
    LINK,
    KeyOwner,
    Owner,
    fast,
    fleet,
    identity_of,
    key_pairs,
    offer_to,
    pull_of,
    serve,
    stage_of,
    staged_of,
    until,
)

pytestmark = pytest.mark.asyncio


async def test_a_pull_is_offered_and_released() -> None:
    owner = Owner()
    with fleet() as nodes:
        server = nodes.serve(owner)
        link = await nodes.watch().ready(server)
        assert link.life is not None
        assert (link.life.node, link.life.stream, link.life.is_new) == ("owner", "tcp://127.0.0.1:9", False)
        pull = pull_of(link.next_pull())
        assert await link.request(pull, 5.0) == offer_to(pull)
        link.release(pull.pull)
        await until(lambda: owner.released == [pull.pull], "it is released")
        ((puller, served, _),) = owner.pulls
        assert served == pull
        assert (puller.node, puller.incarnation, puller.key) == ("puller", identity_of("puller").incarnation, "")
        assert isinstance(await link.request(r.Ping(), 5.0), r.Pong)
        assert link.rtt_s > 0
    assert owner.forgotten == [puller]


async def test_answers_to_all_that_waits_go_out_at_once() -> None:
    owner = Owner(is_slow=True)
    with fleet() as nodes:
        link = await nodes.watch().ready(nodes.serve(owner))
        for _ in range(50):
            waiting = [link.request(pull_of(link.next_pull()), 60.0) for _ in range(LINK.waiting_max)]
            await until(lambda: len(owner.pulls) == LINK.waiting_max, "the pulls have come")
            assert all(answer(offer_to(pull)) for _, pull, answer in owner.pulls), "none finds the connection full"
            assert [(await one).chunks for one in waiting] == [2] * LINK.waiting_max
            owner.pulls.clear()


async def test_as_many_releases_and_pulls_as_may_wait_go_out_at_once() -> None:
    owner = Owner()
    settings = ControlServerSettings(frames_per_s=1e6)
    with fleet() as nodes:
        watcher = nodes.watch()
        link = await watcher.ready(nodes.serve(owner, settings=settings))
        former: list[int] = []
        for _ in range(30):
            for pull in former:
                link.release(pull)
            former = [link.next_pull() for _ in range(LINK.waiting_max)]
            waiting = [link.request(pull_of(number), 60.0) for number in former]
            assert [(await one).chunks for one in waiting] == [2] * LINK.waiting_max
        assert watcher.client.counts["unsent"] == 0


async def test_rows_of_a_pull_are_staged() -> None:
    owner = Owner()
    with fleet() as nodes:
        link = await nodes.watch().ready(nodes.serve(owner))
        assert link.life is not None
        assert link.life.version == r.NEWEST_VERSION
        await link.request(pull_of(1), 60.0)
        stage = stage_of(1)
        assert await link.request(stage, 5.0) == staged_of(stage)
        assert [(puller.node, one) for puller, one, _ in owner.stages] == [("puller", stage)]
        assert isinstance(await link.request(r.Ping(), 5.0), r.Pong)


async def test_stages_without_an_answer_take_the_places_of_pulls() -> None:
    owner = Owner(is_slow=True)
    with fleet() as nodes:
        server = nodes.serve(owner, settings=ControlServerSettings(waiting_max=2))
        link = await nodes.watch().ready(server)
        waiting = [link.request(stage_of(1, part=part), 20.0) for part in (1, 2)]
        for further in (stage_of(1, part=3), pull_of(1)):
            with pytest.raises(Refused) as refusal:
                await link.request(further, 20.0)
            assert refusal.value.code == r.RefusalCode.BUSY
        for (_, stage, answer), asked in zip(owner.stages, waiting, strict=True):
            assert answer(r.Refused(r.RefusalCode.TRANSPORT, "none here"))
            assert not answer(staged_of(stage)), "each has one answer"
            with pytest.raises(Refused, match="none here"):
                await asked
        assert server.stats()["refused.transport"] == 2


async def test_a_staging_that_answers_another_one_ends_the_link() -> None:
    owner = Owner(is_slow=True)
    with fleet() as nodes:
        link = await nodes.watch().ready(nodes.serve(owner))
        asked = link.request(stage_of(1), 20.0)
        await until(lambda: owner.stages, "the Stage has come")
        assert owner.stages[0][2](staged_of(stage_of(2)))
        with pytest.raises(PeerUnreachable, match="bad answer"):
            await asked


async def test_a_puller_that_has_gone_gets_no_staging() -> None:
    owner = Owner(is_slow=True)
    with fleet() as nodes:
        server = nodes.serve(owner)
        link = await nodes.watch().ready(server)
        link.request(stage_of(1), 20.0)
        await until(lambda: owner.stages, "the Stage has come")
        server.close()
        assert not owner.stages[0][2](staged_of(stage_of(1)))


async def test_with_keys_the_owner_knows_who_asks() -> None:
    here, there, fleet_key = key_pairs(3)
    owner = Owner()
    with fleet() as nodes:
        server = nodes.serve(owner, keys=there, allowed=frozenset({here.public_bytes, fleet_key.public_bytes}))
        link = await nodes.watch(keys=here).ready(server, there.public)
        await link.request(pull_of(1), 60.0)
        assert owner.pulls[0][0].key == here.public_bytes.hex()
    with fleet() as nodes:
        server = nodes.serve(owner, keys=fleet_key, allowed=frozenset({fleet_key.public_bytes}))
        assert await nodes.watch(keys=fleet_key).ready(server)


async def test_who_takes_the_name_of_another_node_counts_by_its_own_key() -> None:
    owner, (keys, first, second) = Owner(is_slow=True), key_pairs(3)
    with fleet() as nodes:
        allowed = frozenset({first.public_bytes, second.public_bytes})
        server = nodes.serve(owner, keys=keys, allowed=allowed)
        for one in (first, second):
            link = await nodes.watch(keys=one, node=identity_of("victim")).ready(server, keys.public)
            link.request(r.StageInto(*(*astuple(stage_of(1)), b"agent", 1, bytes(r.MARK_BYTES))), 60.0)
        await until(lambda: len(owner.stages) == 2, "both are served")
        pullers = [puller for puller, *_ in owner.stages]
        assert [one.node for one in pullers] == ["victim", "victim"]
        assert pullers[0].counted != pullers[1].counted
        assert [one.host for one in pullers] == ["127.0.0.1", "127.0.0.1"]


async def test_a_refusal_of_the_owner_is_raised_with_its_code() -> None:
    owner = Owner(is_slow=True)
    with fleet() as nodes:
        link = await nodes.watch().ready(nodes.serve(owner))
        asked = link.request(pull_of(1), 60.0)
        await until(lambda: owner.pulls, "the pull has come")
        assert owner.pulls[0][2](r.Refused("disk", "its disk is busy"))
        with pytest.raises(Refused, match="its disk is busy") as refusal:
            await asked
        assert refusal.value.code == "disk"
        assert not owner.pulls[0][2](offer_to(pull_of(1)))
        assert link.state is LinkState.READY


async def test_a_late_answer_is_dropped_and_its_chunks_are_released() -> None:
    owner = Owner(is_slow=True)
    with fleet() as nodes:
        watcher = nodes.watch()
        link = await watcher.ready(nodes.serve(owner))
        with pytest.raises(PeerUnreachable, match="did not answer in time"):
            await link.request(pull_of(1), 0.05)
        await until(lambda: owner.released == [1], "the pull is released at its deadline")
        asked = link.request(pull_of(2), 60.0)
        await until(lambda: len(owner.pulls) == 2, "the second pull has come")
        asked.cancel()
        await until(lambda: owner.released == [1, 2], "a cancelled pull is released")
        assert [answer(offer_to(pull)) for _, pull, answer in owner.pulls] == [False, False]
        assert isinstance(await link.request(r.Ping(), 5.0), r.Pong)


async def test_what_an_owner_may_still_write_has_no_answer_before_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Stage has: nothing of it is written, and its puller has its deadlines."""
    monkeypatch.setattr(server_module, "STAGE_S", 0.01)
    owner = Owner(is_slow=True)
    with fleet() as nodes:
        link = await nodes.watch().ready(nodes.serve(owner))
        stage = replace(stage_of(1), wait_ms=0)
        into = r.StageInto(*(*astuple(stage), b"agent", 1, bytes(r.MARK_BYTES)))
        written = link.request(into, 60.0)
        with pytest.raises(Refused, match="no answer by the deadline"):
            await link.request(stage, 60.0)
        assert not written.done()
        assert owner.stages[0][1] == into
        assert owner.stages[0][2](staged_of(into))
        assert await written == staged_of(into)


async def test_the_owner_answers_for_a_service_that_never_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "FOLLOW_S", 0.01)
    owner, keys = Owner(is_slow=True), KeyOwner()
    with fleet() as nodes:
        server = nodes.serve(owner, follows=keys)
        link = await nodes.watch().ready(server)
        for ask in (pull_of(1, deadline_ms=1), r.AskKeys(0)):
            with pytest.raises(Refused, match="no answer by the deadline"):
                await link.request(ask, 20.0)
        assert not owner.pulls[0][2](offer_to(pull_of(1)))
        assert not keys.asked[0][2](r.Keys(b"", 0, r.NO_MORE_KEYS))
        assert server.stats()["late_answers"] == 2


async def test_a_service_that_fails_is_a_refusal_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail(ask: r.AskFollow) -> r.FollowAnswer:
        raise RuntimeError("broken")

    with fleet() as nodes:
        server = nodes.serve(Owner(error=RuntimeError("broken")), follows=KeyOwner(reply=fail))
        link = await nodes.watch().ready(server)
        for ask in (pull_of(1), pull_of(2), r.AskChanges(1, 10_000, 0)):
            with pytest.raises(Refused, match="failed"):
                await link.request(ask, 60.0)
        assert server.stats()["errors"] == 3
        assert len([one for one in caplog.records if one.exc_info]) == 1


async def test_unanswered_pulls_of_a_peer_are_bounded_on_both_sides() -> None:
    owner = Owner(is_slow=True)
    with fleet() as nodes:
        server = nodes.serve(owner, settings=fast(ControlServerSettings(), waiting_max=3))
        link = await nodes.watch(link=LinkSettings(waiting_max=5, connect_s=5.0, ping_s=10.0)).ready(server)
        asked = [link.request(pull_of(number), 10.0) for number in range(1, 6)]
        with pytest.raises(PeerNotAsked, match="5 requests without an answer"):
            await link.request(pull_of(6), 10.0)
        for one in asked[3:]:
            with pytest.raises(Refused, match="wait for their answers"):
                await one
        for _, pull, answer in owner.pulls:
            assert answer(offer_to(pull))
        assert [(await one).pull for one in asked[:3]] == [1, 2, 3]


async def test_a_restarted_peer_is_a_new_life_and_waiting_requests_fail_at_once() -> None:
    owner = Owner(is_slow=True)
    with fleet() as nodes:
        watcher = nodes.watch()
        first = serve(owner, node=identity_of("owner", 1))
        link = await watcher.ready(first)
        asked = link.request(pull_of(1), 30.0)
        await until(lambda: owner.pulls, "the pull has come")
        endpoint = first.endpoints[0]
        first.close()
        with pytest.raises(PeerUnreachable, match="the connection ended"):
            await asked
        with pytest.raises(PeerUnreachable, match="not connected"):
            await link.request(pull_of(2), 30.0)
        nodes.serve(Owner(), node=identity_of("owner", 2), address=endpoint)
        await until(lambda: link.state is LinkState.READY, "it is connected again")
        assert link.life is not None
        assert link.life.is_new
        assert watcher.client.stats()["new_lives"] == 1
        assert (await link.request(pull_of(3), 60.0)).chunks == 2
        assert [is_ready for _, is_ready in watcher.changes] == [True, False, True]


async def test_a_peer_that_comes_later_is_connected() -> None:
    with fleet() as nodes:
        watcher = nodes.watch()
        gone = serve(Owner())
        endpoint = gone.endpoints[0]
        gone.close()
        link = watcher.link_at(endpoint)
        await until(lambda: watcher.client.counts["connects"] > 3, "it is tried again")
        nodes.serve(Owner(), address=endpoint)
        await until(lambda: link.state is LinkState.READY, "it is connected")


@pytest.mark.parametrize(
    ("puller", "expected"),
    [
        (identity_of("puller", domain=b"x" * 32), "domain: the nodes belong to different trust domains"),
        (identity_of("owner"), "self: this node has the same name"),
    ],
)
async def test_nodes_that_do_not_belong_together_are_refused_and_tried_again_later(
    puller: object, expected: str
) -> None:
    with fleet() as nodes:
        server = nodes.serve(Owner())
        watcher = nodes.watch(node=puller)
        link = watcher.link_to(server)
        await until(lambda: expected in link.fault, "it is refused")
        assert link.life is None
        assert not any(is_ready for _, is_ready in watcher.changes)
        assert server.stats()["pullers"] == 0
        assert server.stats()[f"refused.{expected.partition(':')[0]}"] >= 1


async def test_another_node_at_a_members_address_is_not_taken_for_it() -> None:
    with fleet() as nodes:
        watcher = nodes.watch()
        link = watcher.link_to(nodes.serve(Owner()), node="somebody")
        await until(lambda: "expected 'somebody'" in link.fault, "it is refused")


async def test_a_node_that_connects_again_replaces_its_former_connection() -> None:
    owner = Owner(is_slow=True)
    with fleet() as nodes:
        server = nodes.serve(owner)
        await nodes.watch().ready(server)
        await nodes.watch(node=identity_of("puller", 1)).ready(server)
        await until(lambda: len(owner.forgotten) == 1, "the former connection is forgotten")
        assert server.stats()["pullers"] == 1


async def test_a_second_node_of_a_name_is_refused_until_the_first_has_gone() -> None:
    with fleet() as nodes:
        server, first, second = nodes.serve(Owner()), nodes.watch(), nodes.watch(node=identity_of("puller", 2))
        link = await first.ready(server)
        double = second.link_to(server)
        await until(lambda: "refused: name: another node that calls itself 'puller'" in double.fault, "it is refused")
        assert link.life is not None, "the first one is served"
        link.close()
        await until(lambda: double.life is not None, "the name is free")


@pytest.mark.slow
async def test_a_silent_connection_is_forgotten_and_a_pinging_one_is_not() -> None:
    owner = Owner()
    with fleet() as nodes:
        server = nodes.serve(owner, settings=fast(ControlServerSettings(), idle_s=1.5))
        lively = await nodes.watch(link=LinkSettings(ping_s=0.2, connect_s=5.0)).ready(server)
        silent = await nodes.watch(node=identity_of("other"), link=LINK).ready(server)
        await until(lambda: [one.node for one in owner.forgotten] == ["other"], "the silent one is forgotten")
        await until(lambda: silent.fault == "the connection ended", "its connection is shut down")
        assert lively.state is LinkState.READY
        await until(lambda: silent.state is LinkState.READY, "it greets again")
        assert (await silent.request(pull_of(2), 60.0)).chunks == 2


async def test_a_stopping_node_refuses_pulls_and_reports_nothing() -> None:
    keys = KeyOwner(reply=lambda ask: r.Changes(3, 3, False, bytes(32), b"", 0))
    with fleet() as nodes:
        server = nodes.serve(Owner(), follows=keys)
        link = await nodes.watch().ready(server)
        server.is_stopping = True
        for ask in (pull_of(1), r.AskKeys(0), r.AskChanges(2, 0, 0)):
            with pytest.raises(Refused, match=r"stopping|about to end"):
                await link.request(ask, 60.0)
        assert keys.asked == []


async def test_keys_are_needed_beyond_loopback() -> None:
    (pair,) = key_pairs(1)
    with pytest.raises(ConfigError, match="beyond loopback"):
        serve(Owner(), address="tcp://192.0.2.7:5600")
    with pytest.raises(ConfigError, match="both or none"):
        serve(Owner(), keys=pair)
    with pytest.raises(ConfigError, match="no tcp address"):
        serve(Owner(), address="ipc:///nowhere/socket")
    with pytest.raises(OSError, match=r"192\.0\.2\.7:5600 cannot be bound"):
        serve(Owner(), keys=pair, allowed=frozenset({pair.public_bytes}), address="tcp://192.0.2.7:5600")
    assert ZmqAddress("tcp://192.0.2.7:1", is_local=False)


async def test_a_key_that_is_no_longer_allowed_is_disconnected() -> None:
    here, there, other = key_pairs(3)
    owner = Owner()
    with fleet() as nodes:
        server = nodes.serve(owner, keys=there, allowed=frozenset({here.public_bytes, other.public_bytes}))
        first = await nodes.watch(keys=here).ready(server, there.public)
        second = await nodes.watch(keys=other, node=identity_of("second")).ready(server, there.public)
        server.admit(frozenset({other.public_bytes}))
        await until(lambda: first.state is not LinkState.READY, "the first is disconnected")
        await until(lambda: server.stats()["refused_handshakes"] >= 1, "it is refused")
        await until(lambda: second.state is LinkState.READY, "the second is connected again")
        assert first.life is None
        assert (await second.request(pull_of(1), 60.0)).chunks == 2


async def test_links_follow_the_members() -> None:
    with fleet() as nodes:
        watcher = nodes.watch()
        servers = [nodes.serve(Owner(), node=identity_of(f"node-{number}")) for number in range(3)]
        members = [Member(server.endpoints[0], node=f"node-{number}") for number, server in enumerate(servers)]
        watcher.client.follow(MembersChange(joined=tuple(members)))
        await until(lambda: watcher.client.stats()["ready"] == 3, "all are connected")
        kept = watcher.link_named("node-1")
        moved = Member(servers[0].endpoints[0], node="node-2")
        watcher.client.follow(MembersChange(left=(members[0],), renewed=(moved,)))
        await until(lambda: "node 'node-0' answers" in watcher.link_named("node-2").fault, "the moved one is another")
        assert watcher.link_named("node-1") is kept
        assert watcher.client.link_to("node-0") is None
        assert kept.state is LinkState.READY


async def test_a_loop_that_hangs_is_found_by_pings() -> None:
    is_hanging = False
    with fleet() as nodes:
        server = nodes.serve(Owner())
        original = server._take
        server._listener._on_message = lambda arrival: None if is_hanging else original(arrival)
        link = await nodes.watch(link=LinkSettings(ping_s=0.1, connect_s=0.5)).ready(server)
        is_hanging = True
        await until(lambda: link.fault == "no answer to a ping", "it is given up")


async def test_a_link_without_sockets_is_tried_again() -> None:
    with fleet() as nodes:
        server = nodes.serve(Owner())
        watcher = nodes.watch()
        context = watcher.client._context
        taken = []
        with contextlib.suppress(zmq.ZMQError):
            while True:
                taken.append(context.socket(zmq.PAIR))
        link = watcher.link_to(server)
        await until(lambda: "cannot be connected: Too many open files" in link.fault, "it fails")
        for one in taken:
            one.close()
        await until(lambda: link.state is LinkState.READY, "it is connected")
