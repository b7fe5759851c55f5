"""Batches that ask for more than an answer holds, that contain forbidden requests, or that are refused in part."""

from typing import Any

import msgpack
import pytest

import kvpool_client as kv
from kvpool.errors import Refused
from kvpool.ids import KEY_BYTES
from kvpool.protocol import frames
from kvpool.protocol.records import batch as bm
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import promises as pr
from kvpool.protocol.reserve_runs import reserve_chain
from kvpool.states import SaveState
from tests.hostile.rigs.raw_clients import engine, keys_of
from tests.rigs.daemon import SMALL, Daemon
from tests.rigs.dropping import drop_reservations


def body_of(request: object) -> bytes:
    return m.encode(request, 0)[frames.LENGTH.size :]


LEAVES = body_of(m.Acquire(bytes(KEY_BYTES), m.LEAF_CHUNKS_MAX))
MAPS = msgpack.packb([m.Acquire.KIND, 0, [{}] * 3400, 0, "", 0])

BAD: dict[str, tuple[list[Any], str]] = {
    "none": ([], "a batch has 0 requests, expected 1..256"),
    "too many": ([body_of(m.Acquire(keys_of(1, 1)))] * 257, "a batch has 257 requests, expected 1..256"),
    "no bytes": ([7], "a request of int, expected bytes"),
    "no frame": ([b"\xc1"], "not msgpack of this protocol"),
    "empty": ([b""], "not msgpack of this protocol"),
    "an operator's": ([body_of(m.AskInfo())], "kind 31|a request of kind"),
    "a batch": ([body_of(bm.Batch([]))], "a request of kind 60"),
    "leaves": ([LEAVES] * 5, "asks for 20475 chunks by leaves, expected at most 20000"),
    "maps": ([MAPS] * 200, "Acquire has a field of list, expected bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_is_refused_by_name_and_ends_only_its_connection(shared_daemon: Daemon, name: str) -> None:
    requests, message = BAD[name]
    with engine(shared_daemon) as honest, engine(shared_daemon) as bad:
        keys = keys_of(1, 1)
        with pytest.raises(Refused, match=message) as refused:
            bad.call(bm.Batch(requests), bm.Batched)
        assert refused.value.code == "protocol"
        made = honest.call(reserve_chain(b"", keys), m.Reserved)
        assert made.states == bytes([SaveState.RESERVED])
        drop_reservations(honest, made.reservation)
    assert not shared_daemon.problems()


@pytest.mark.parametrize(
    ("request_", "count", "message"),
    [
        (m.Acquire(keys_of(0, 2), 2000), 6, "asks for 23988 chunks by leaves, expected at most 20000"),
        (pr.Promise(keys_of(0, 2), 100_000, "", 1, 1), 2, "asks for promises of 400064 bytes, expected at most 400000"),
    ],
    ids=["leases", "promises"],
)
def test_a_batch_counts_the_chunks_of_every_group(
    shared_daemon: Daemon, request_: object, count: int, message: str
) -> None:
    groups = tuple(kv.Group(layers=1, kv_heads=1, head_dim=8 * heads, dtype="int8", planes=1) for heads in (1, 2))
    layout = kv.Layout(chunk_tokens=1, groups=groups)
    with engine(shared_daemon, layout, "two chains") as bad, pytest.raises(Refused, match=message):
        bad.call(bm.Batch([body_of(request_)] * count), bm.Batched)


def test_a_refused_part_of_a_batch_does_not_affect_the_others(shared_daemon: Daemon) -> None:
    keys = [keys_of(number, 1) for number in range(3)]
    with engine(shared_daemon) as connection:
        requests = [
            body_of(reserve_chain(b"", keys[0])),
            body_of(m.Commit(999_999, bytes(4 * SMALL.extents), b"")),
            body_of(reserve_chain(b"", keys[2])),
        ]
        answers = [frames.decode(body) for body in connection.call(bm.Batch(requests), bm.Batched).answers]
        assert [kind == m.Reserved.KIND for kind, _, _ in answers][::2] == [True, True]
        for _, _, values in answers[::2]:
            drop_reservations(connection, m.decode_as(m.Reserved, values).reservation)
    assert not shared_daemon.problems()
