"""Lookups: the longest prefix that is there of all groups and parts, never of another model, and no longer than a lease."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import kvpool_client as kv
from kvpool.keys import DEFAULT_DOMAIN, namespace_name, root_key
from kvpool.protocol.records import messages as m
from kvpool.protocol.records.messages import HOLDS_MAX
from kvpool_client.connection.counters import Counters
from kvpool_client.key_chain import KeyChain
from kvpool_client.verbs.finder import Finder
from kvpool_client.verbs.lease_bound import chunks_held, chunks_named
from tests.e2e.pool.conftest import Shared
from tests.rigs.daemon import SMALL
from tests.rigs.layouts import CHUNK, DIVIDED, FULL, HYBRID, WINDOW, over
from tests.rigs.payload import tokens_of
from tests.rigs.prompts import CHUNKS, Ranks, assert_loads, assert_served, begin, load, prompt, store, whole_result
from tests.rigs.runs.children import assert_in_child

# The root of a Pool of this layout and model since the key format exists.
ROOT = "eed2314b37fe0cc773f27abc5db700ad145af6847eaccba0b7478df45bf7db73"


@over()
def test_a_prompt_is_a_hit_as_far_as_every_rank_has_stored_it(ranks: Ranks) -> None:
    pool, keys = ranks.first, ranks.prompt(1)
    hit = pool.lookup(keys)
    assert (hit.chunks, hit.tokens, len(hit.tiers)) == (0, 0, 0)
    with pool.acquire(hit) as lease:
        assert (lease.chunks, lease.tokens, lease.cost_s, lease.ticket()) == (0, 0, 0.0, b"")
        assert load(pool, lease)[0] == whole_result(ranks.layout, 0)
    saves = ranks.begin(keys, [4, CHUNKS])
    for save in saves:
        assert pool.lookup(keys).chunks == 0
        assert save.commit().declined == 0
    for each in ranks.pools:
        hit = each.lookup(keys)
        assert (hit.chunks, hit.tokens, hit.chunks_here) == (CHUNKS, CHUNKS * CHUNK, CHUNKS)
        assert hit.tiers.tolist() == [kv.Level.DRAM] * CHUNKS
    tokens = tokens_of(1, CHUNKS * CHUNK + 1)
    assert pool.lookup(pool.keys([*tokens, *tokens])).chunks == CHUNKS
    ends = (4, 4) if ranks.case.has_windows else (4, CHUNKS - 1)
    assert [pool.lookup(pool.keys(tokens[: end * CHUNK])).chunks for end in (4, CHUNKS - 1)] == list(ends)
    assert [pool.lookup(keys, chunks_max=end).chunks for end in (4, CHUNKS - 1)] == list(ends)
    tokens[4 * CHUNK] += 1
    ranks.assert_served(pool.keys(tokens), 4)
    with pytest.raises(kv.InvalidArgument, match="chunks_max"):
        pool.lookup(keys, chunks_max=CHUNKS + 1)


def test_full_chunks_are_counted_beside_what_serves(shared: Shared) -> None:
    with shared.connect(HYBRID) as pool:
        keys = prompt(pool, 1)
        for chosen in ([(0, 1, 2), (1, 2), ()], [(3, 4, 5), (4, 5), (5,)]):
            assert [entry.stored for entry in store(pool, keys, chosen=chosen).groups] == list(map(len, chosen))
        assert pool.lookup(keys, chunks_max=5).chunks == 0, "no state was stored before"
        assert pool.lookup(keys, chunks_max=5).full_chunks == 5
        assert_served(pool, keys, CHUNKS)


def test_a_junction_of_two_prompts_is_stored_by_who_computes_past_it(shared: Shared) -> None:
    with shared.connect(HYBRID) as pool:
        head = tokens_of(1, 6 * CHUNK)
        store(pool, pool.keys(np.concatenate([head, tokens_of(3, 4 * CHUNK + 1)])))
        keys = pool.keys(np.concatenate([head, tokens_of(2, 4 * CHUNK + 1)]))
        hit = pool.lookup(keys)
        assert (hit.chunks, hit.full_chunks) == (0, 6)
        assert store(pool, keys, [hit.full_chunks, len(keys)]).groups[FULL].present == 6
        assert_served(pool, pool.keys(np.concatenate([head, tokens_of(4, CHUNK)])), 6)


@over("plain", "hybrid", "divided")
def test_namespaces_never_meet(ranks: Ranks, shared: Shared) -> None:
    keys, tokens = ranks.prompt(13), tokens_of(13, CHUNKS * CHUNK + 1)
    ranks.store(keys)
    pool, share = ranks.first, ranks.case.shares[0]
    assert pool.lookup(pool.keys(tokens, adapter="lora")).chunks == 0
    image = pool.lookup(pool.keys(tokens, extra=[(40, 50, b"image")]))
    nothing: Any = np.array([], object)
    assert pool.keys(tokens, extra=nothing).columns() == pool.keys(tokens).columns()
    assert (image.chunks, image.full_chunks) == (0 if ranks.case.has_windows else 1, 1)
    for arguments in ({"model": "other"}, {"salt": b"tenant"}, {"revision": "b"}):
        with shared.connect(ranks.layout, share=share, **arguments) as other:
            assert other.lookup(other.keys(tokens)).chunks == 0
            assert other.lookup(other.keys(tokens, salt=b"")).chunks == (CHUNKS if "salt" in arguments else 0)


def test_a_key_of_another_namespace_is_not_served(shared: Shared) -> None:
    """A client that asks with another model's keys gets no lease, whatever the index contains."""
    with shared.connect() as pool, shared.connect(model="other") as other:
        keys = prompt(pool, 14, 3)
        store(pool, keys)
        hit = other._finder.lookup(keys, "")  # past the checks of a caller's mistakes
        assert hit.chunks == 3
        assert other._lease_fetcher.acquire(hit).chunks == 0


def test_chunks_of_one_revision_are_no_others(shared: Shared) -> None:
    tokens, model = tokens_of(1, 3 * CHUNK), shared.model
    with shared.connect() as bare, shared.connect(revision="a") as old, shared.connect(revision="b") as new:
        pools = (bare, old, new)
        assert [pool.model for pool in pools] == [model, f"{model}@a", f"{model}@b"]
        assert len({pool.keys(tokens)[0] for pool in pools}) == 3
        assert store(old, old.keys(tokens)).stored == 3
        assert [pool.lookup(pool.keys(tokens)).chunks for pool in pools] == [0, 3, 0]
        with shared.connect(revision="a") as same:
            assert_served(same, same.keys(tokens), 3)
        with shared.daemon.admin() as admin:
            assert [admin.flush(each.model, None)["chunks"] for each in pools] == [0, 3, 0]


def test_a_pool_without_a_revision_keeps_its_keys() -> None:
    assert root_key(DEFAULT_DOMAIN, model="test-model", adapter="", salt=b"", layout=SMALL).hex() == ROOT
    tokens = tokens_of(1, 3 * CHUNK)
    with (
        kv.connect("/nowhere", model="test-model", layout=SMALL) as bare,
        kv.connect("/nowhere", model="test-model", revision="", layout=SMALL) as empty,
    ):
        assert bare.keys(tokens).columns() == empty.keys(tokens).columns()
    assert namespace_name("test-model", "") == "test-model"


@pytest.mark.parametrize("revision", [None, 7, b"a", "a@b", "x" * 600])
def test_an_invalid_revision_is_refused(revision: object) -> None:
    with pytest.raises(kv.InvalidArgument, match="revision"):
        kv.connect("/nowhere", model="test-model", revision=revision, layout=SMALL)  # type: ignore[arg-type]


def test_keys_depend_on_tokens_and_hashes_alone(shared: Shared) -> None:
    with shared.connect() as pool:
        tokens = tokens_of(9, 300)
        grown = pool.keys(tokens[:70].tolist())
        grown.extend(tokens[70:71])
        grown.extend(tokens[71:])
        whole = pool.keys(tokens.astype(np.int64))
        assert grown.tokens == whole.tokens == 288
        assert grown.columns() == whole.columns()
        hashes = [bytes([number]) * 32 for number in range(7)]
        keys = pool.keys_from_hashes(hashes, block_tokens=16)
        assert len(keys) == 3
        changed = [*hashes[:2], b"x" * 32, *hashes[3:]]
        assert pool.keys_from_hashes(changed, block_tokens=16).columns() == keys.columns(), "no chunk ends with it"
        changed[3] = b"y" * 32
        other = pool.keys_from_hashes(changed, block_tokens=16)
        assert [other[number] == keys[number] for number in range(3)] == [True, False, False]


@pytest.mark.parametrize("tokens", [[1.5, 2.5], [[1, 2]], "text", [1 << 40], None])
def test_invalid_token_ids_raise_at_the_call(shared: Shared, tokens: object) -> None:
    with shared.connect() as pool, pytest.raises(kv.InvalidArgument):
        pool.keys(tokens)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda pool, _: pool.keys([1], adapter="\ud800"), r"adapter is '\\ud800', expected text"),
        (lambda pool, _: pool.keys([1], extra=7), "extra is 7, expected a sequence"),
        (lambda pool, _: pool.keys([1], extra=np.array([(0, 4, b"x")], object)), "extra"),
        (lambda pool, _: pool.keys_from_hashes(7, 32), "block_hashes is 7, expected a sequence"),
        (lambda pool, _: pool.keys_from_hashes([], 32, adapter_name=7), "adapter_name is 7, expected text"),
        (lambda pool, _: pool.register(7, 16), "layers is 7, expected a sequence"),
        (lambda pool, keys: pool.save(keys, boundaries=7), "boundaries is 7, expected a sequence"),
        (lambda pool, keys: pool.save(keys, chosen=[7]), "chosen of group 0 is 7, expected a sequence"),
        (lambda pool, keys: pool.announce(keys, -1), rf"chunks_max is -1, expected 0\.\.{CHUNKS}"),
        (lambda pool, keys: pool.announce(keys, 1.5), rf"chunks_max is 1.5, expected 0\.\.{CHUNKS}"),
        (lambda pool, _: kv.connect(model="\ud800", layout=pool.layout), r"model is '\\ud800', expected text"),
    ],
)
def test_a_mistake_of_the_caller_raises_by_name_and_ends_nothing(
    shared: Shared, attempt: Callable[[kv.Pool, kv.KeyChain], object], message: str
) -> None:
    with shared.connect() as pool:
        keys = prompt(pool, 1)
        store(pool, keys)
        with pool.acquire(pool.lookup(keys)) as lease:
            with pytest.raises(kv.InvalidArgument, match=message):
                attempt(pool, keys)
            assert_loads(pool, keys, lease)


@pytest.mark.parametrize(
    ("model", "layout", "named"),
    [
        ("another", SMALL, r"of the Pool of 'another' at /.*, expected .* of the Pool of 'model-.*' at /.*\.sock$"),
        (
            None,
            replace(SMALL, chunk_tokens=64),
            r"of the Pool of 'model-.*, expected .* of 'model-.*: the layout has chunk_tokens 64, expected 32",
        ),
        (None, replace(SMALL, rank=None, world=2), ": the layout has rank None, expected 0"),
    ],
)
def test_keys_of_another_pool_are_refused_unless_they_are_the_same_keys(
    shared: Shared, model: str | None, layout: kv.Layout, named: str
) -> None:
    with (
        shared.connect() as pool,
        shared.connect() as twin,
        shared.connect(layout, model=model or shared.model) as other,
    ):
        keys = prompt(twin, 17)
        assert store(pool, keys).stored == CHUNKS
        foreign = other.keys(tokens_of(17, CHUNKS * CHUNK))
        hit = other.lookup(foreign)
        rows = np.zeros((len(foreign), SMALL.chunk_bytes), np.uint8)
        for attempt in (
            lambda: pool.lookup(foreign),
            lambda: pool.acquire(hit),
            lambda: pool.save(foreign, from_=rows),
            lambda: pool.is_being_saved(foreign, 0),
            lambda: pool.retain(foreign, [kv.TokenRange(0)]),
            lambda: pool.announce(foreign),
            lambda: pool.demote(foreign),
            lambda: pool.hint({}, foreign),
            lambda: pool.lookup(KeyChain(SMALL.chunk_tokens, lambda: (bytes(32),))),
        ):
            with pytest.raises(kv.InvalidArgument, match=r"(keys are|hit is) of "):
                attempt()
        for attempt in (lambda: pool.lookup(foreign), lambda: pool.acquire(hit)):
            with pytest.raises(kv.InvalidArgument, match=named):
                attempt()
        assert_served(pool, keys, CHUNKS)


def test_a_layout_of_a_group_and_an_owner_beside_groups_are_refused(shared: Shared) -> None:
    with pytest.raises(kv.InvalidArgument, match="that of one group \\(window"):
        shared.connect(HYBRID.of_group(WINDOW))
    with shared.connect(HYBRID) as pool, pytest.raises(kv.InvalidArgument, match="names no node"):
        pool.lookup(prompt(pool, 1), owner="node-b")


@pytest.mark.parametrize(
    ("layout", "share", "message"),
    [
        *((SMALL, wrong, "share") for wrong in (kv.Share(0, 4), kv.Share(-1, 1), kv.Share(0, 3, 0, 2), kv.Share(0, 0))),
        (SMALL, kv.Share(0, True), "share"),
        (SMALL, 3, "share is int"),
        (SMALL, [kv.Share(0, 1)], "share is list"),
        (DIVIDED, kv.Share(0, 2), r"share is Share.* expected a kvpool_client.Share for each of 3 groups"),
        (DIVIDED, [kv.Share(0, 2)], "for each of 3 groups"),
        (DIVIDED, [kv.Share(0, 2, 0, 4), None, None], "share is NoneType"),
        (DIVIDED, [kv.Share(0, 2, 0, 4), kv.Share(0, 4), kv.Share(0, 3)], "expected some of the layout's 3"),
        (DIVIDED, [kv.Share(0, 2, 0, 4), kv.Share(0, 3, 2, 2), kv.Share(0, 3)], "expected some of the layout's 2"),
    ],
    ids=str,
)
def test_a_share_that_the_layout_does_not_have_is_refused_by_name(
    shared: Shared, layout: kv.Layout, share: Any, message: str
) -> None:
    with pytest.raises(kv.InvalidArgument, match=message):
        shared.connect(layout, share=share)


def windowed(window: int, chunk_tokens: int, ranks: int) -> kv.Layout:
    """A scheduler's layout of a full layer and one with a window."""
    shape: dict[str, Any] = {"layers": 1, "kv_heads": 1, "head_dim": 8, "dtype": "uint8", "planes": 1}
    groups = (kv.Group(**shape), kv.Group(kind="window", window=window, **shape))
    return kv.Layout(chunk_tokens=chunk_tokens, rank=None, world=ranks, groups=groups)


def finder_of(layout: kv.Layout) -> Finder:
    """A finder without a daemon."""
    return Finder(layout, cast(Any, SimpleNamespace(session=None)), Counters(), timeout_s=1.0)


MANY_RANKS = windowed(16 * 140, 16, 8)


@pytest.mark.parametrize(("holds", "chunks"), [(HOLDS_MAX, 150), (1024, 127)])
def test_a_hit_of_many_ranks_ends_where_a_lease_has_no_more_holds_and_each_rank_loads_it(
    holds: int, chunks: int, shared: Shared, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole prompt needs 1128; fewer are given here, so that one needs no more than a small daemon has room for."""
    for module in ("lease_bound", "finder"):
        monkeypatch.setattr(f"kvpool_client.verbs.{module}.HOLDS_MAX", holds)
    with shared.connect(MANY_RANKS) as scheduler:
        warnings = [record.getMessage() for record in caplog.records if "hits end" in record.getMessage()]
        if chunks < 150:
            assert "hits end at 2032 tokens (127 chunks of 16): a lease has 1024 holds" in warnings[0]
            assert "up to 1120 in 2 groups on 8 ranks" in warnings[0]
        assert len(warnings) == (chunks < 150)
        keys = prompt(scheduler, 1, 150)
        workers = [shared.connect(replace(MANY_RANKS, rank=rank)) for rank in range(8)]
        for worker in workers:
            named = worker.chunks_to_save(prompt(worker, 1, 150))
            assert named == (range(150), tuple(range(10 if chunks == 150 else 0, 150))), "the hit's end is a boundary"
            assert store(worker, prompt(worker, 1, 150)).declined == 0
        hit = scheduler.lookup(keys)
        assert (hit.chunks, hit.tokens) == (chunks, chunks * 16)
        assert scheduler.lookup(keys, chunks_max=150).chunks == chunks == min(150, scheduler.chunks_max)
        announced = scheduler.announce(keys)
        assert (announced.announced, announced.clipped) == (chunks, 0)
        with scheduler.acquire(hit) as lease:
            assert lease.chunks == chunks
            ticket = lease.ticket()
        for worker in workers:
            with worker.claim(ticket) as claimed:
                assert claimed.chunks == chunks
                assert_loads(worker, prompt(worker, 1, 150), claimed)
            worker.close()


@pytest.mark.parametrize(
    ("window", "chunk_tokens", "ranks", "chunks"),
    [
        (8192, 64, 8, m.KEYS_MAX),  # Llama 4 at tensor-parallel size 8
        (8192, 16, 8, 511),
        (8176, 16, 8, m.KEYS_MAX),
        (8192, 64, 32, 127),
        (8192, 64, 1, m.KEYS_MAX),
        (1 << 20, 16, 1, 4095),
        (1 << 20, 16, 1024, 3),
    ],
)
def test_the_longest_hit_is_that_whose_holds_one_lease_has(
    window: int, chunk_tokens: int, ranks: int, chunks: int, caplog: pytest.LogCaptureFixture
) -> None:
    layout = windowed(window, chunk_tokens, ranks)
    assert chunks_held(layout, ranks) == chunks
    found = finder_of(layout).chunks_max
    assert found == min(chunks, chunks_named(layout, ranks))
    assert (found == chunks) == (chunks < m.KEYS_MAX)
    warned = f"hits end at {chunks * chunk_tokens} tokens ({chunks} chunks of {chunk_tokens}): a lease has 4096 holds"
    assert [warned in line for line in caplog.messages] == [True] * (chunks < m.KEYS_MAX)


def test_a_scheduler_of_many_ranks_finds_long_prompts() -> None:
    state = kv.Group(kind="state", layers=1, state_bytes=1024)
    two = windowed(64, 16, 8)
    longest = finder_of(replace(two, groups=(*two.groups, state))).chunks_max
    assert longest * 8 + 8 * (4 + 1) <= m.KEYS_MAX < (longest + 1) * 8 + 8 * (4 + 1)


def test_the_boundary_of_the_longest_lease_is_saved(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = replace(windowed(8192, 16, 2), rank=0)
    for holds, windows in ((HOLDS_MAX, range(1100 - 512, 1100)), (1024, (*range(511), *range(1100 - 512, 1100)))):
        monkeypatch.setattr("kvpool_client.verbs.lease_bound.HOLDS_MAX", holds)
        with shared.connect(layout) as worker:
            assert worker.chunks_to_save(prompt(worker, 1, 1100))[1] == tuple(windows)


@over("plain", "divided")
def test_a_pool_in_a_forked_child_misses(ranks: Ranks) -> None:
    keys = ranks.prompt(1)
    ranks.store(keys)

    def misses(pool: kv.Pool) -> bool:
        is_right = pool.lookup(keys).chunks == 0 and not pool.connected
        pool.close()
        return is_right

    assert_in_child(lambda: all(map(misses, ranks.pools)))
    ranks.assert_served(keys)


@over("plain", "hybrid")
def test_a_lease_is_of_its_pool(ranks: Ranks, shared: Shared) -> None:
    pool, keys = ranks.first, ranks.prompt(18)
    ranks.store(keys)
    with shared.connect(ranks.layout) as twin, shared.connect(ranks.layout, model="another") as other:
        with pool.acquire(pool.lookup(keys)) as lease:
            for named, reader in (
                ("lease is of the Pool of 'model-.*' at /.*, expected one of the Pool of 'another' at /", other),
                (r"lease is of another connection, the Pool of 'model-.*: acquire .*claim\(lease\.ticket\(\)\)", twin),
            ):
                attempts: list[Callable[[], object]] = [partial(load, reader, lease), partial(reader.load_set, lease)]
                if not ranks.layout.groups:
                    attempts.append(partial(reader.leased_memory, lease))
                for attempt in attempts:
                    with pytest.raises(kv.InvalidArgument, match=named):
                        attempt()
            with pytest.raises(kv.InvalidArgument, match="lease is NoneType, expected what acquire"):
                pool.load(None, into=[])  # type: ignore[arg-type]  # the mistake
            assert other.claim(lease.ticket()).chunks == 0
            with twin.claim(lease.ticket()) as claimed:
                assert_loads(twin, keys, claimed)
        begin(pool, keys).abort()
