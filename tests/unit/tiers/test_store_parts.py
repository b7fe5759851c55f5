"""Parts of the store tier: ranges of memory, remembered answers, frames to the store process, names and headers of objects."""

import random
import subprocess
from typing import cast

import pytest

from kvpool.errors import ProtocolError
from kvpool.ids import PAGE_BYTES, NamespaceId, SizeClassId
from kvpool.index.namespaces import Namespace
from kvpool.keys import namespace_fingerprint
from kvpool.tiers.store import wire
from kvpool.tiers.store.objects import EPOCH, ObjectForm
from kvpool.tiers.store.presence import Presence
from kvpool.transfer.child import process
from kvpool.transfer.child.frames import Frames, pack
from kvpool.transfer.ranges import Ranges
from tests.rigs.daemon import SMALL

KEY = bytes(range(32))
FORM = ObjectForm(Namespace(NamespaceId(1), SizeClassId(0), "model", SMALL))
CHECKSUMS = bytes(range(4 * SMALL.extents))


def test_ranges_never_overlap_and_all_come_back(seed: int) -> None:
    chance, ranges, size = random.Random(seed), Ranges(PAGE_BYTES, 64 * PAGE_BYTES), 64 * PAGE_BYTES
    taken: dict[int, int] = {}
    for _ in range(2000):
        if taken and chance.random() < 0.5:
            offset = chance.choice(list(taken))
            ranges.give(offset, taken.pop(offset))
        else:
            wanted = chance.randrange(1, 8 * PAGE_BYTES)
            found = ranges.take_range(wanted)
            if found is not None:
                assert PAGE_BYTES <= found <= size + PAGE_BYTES - wanted
                assert all(found >= at + one or at >= found + wanted for at, one in taken.items())
                taken[found] = wanted
    for offset, one in taken.items():
        ranges.give(offset, one)
    assert ranges.taken_bytes == 0
    assert ranges.take_range(size) == PAGE_BYTES
    assert ranges.take_range(1) is None


def test_a_range_is_given_back_once() -> None:
    ranges = Ranges(0, 4 * PAGE_BYTES)
    offset = ranges.take_range(PAGE_BYTES)
    assert ranges.take_range(PAGE_BYTES) is not None
    assert offset is not None
    ranges.give(offset, PAGE_BYTES)
    with pytest.raises(AssertionError):
        ranges.give(offset, PAGE_BYTES)


def test_answers_are_forgotten_in_time_and_beyond_the_bound() -> None:
    presence = Presence(2)
    presence.note_answer(b"a", 10, is_there=True)
    presence.note_answer(b"b", 20, is_there=False)
    assert (presence.of(b"a", 9), presence.of(b"a", 10), presence.of(b"b", 10)) == (True, None, False)
    presence.note_answer(b"c", 20, is_there=True)
    assert presence.of(b"a", 0) is None
    assert len(presence) == 2
    assert presence.leading([b"c", b"b", b"c"], 0) == 1


def test_frames_are_read_however_they_are_cut() -> None:
    messages = [[1, wire.EXIST, ["a"], [], []], {"master": "x"}, [0, ""]]
    stream = b"".join(pack(one) for one in messages)
    for piece in (1, 7, len(stream)):
        frames = Frames()
        read = [one for at in range(0, len(stream), piece) for one in frames.feed(stream[at : at + piece])]
        assert read == messages


@pytest.mark.parametrize("stream", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1"])
def test_what_is_no_frame_is_refused(stream: bytes) -> None:
    with pytest.raises(ProtocolError):
        Frames().feed(stream)


def test_a_name_has_the_namespace_and_the_key() -> None:
    other = ObjectForm(Namespace(NamespaceId(1), SizeClassId(0), "other", SMALL))
    assert FORM.name_of(KEY) == f"kvpool/1/{namespace_fingerprint('model', SMALL).hex()[:16]}/{KEY.hex()}"
    assert FORM.name_of(KEY) != other.name_of(KEY)


def test_a_header_is_believed_for_its_own_chunk_alone() -> None:
    page = FORM.header_of(KEY, CHECKSUMS)
    assert len(page) == FORM.header_bytes
    assert len(EPOCH) == 16
    assert FORM.checksums_in(page, KEY) == CHECKSUMS
    assert FORM.checksums_in(page, KEY[::-1]) == b""
    for model, layers in (("other", SMALL.layers), ("model", SMALL.layers + 1)):
        layout = type(SMALL)(layers=layers, kv_heads=2, head_dim=16, dtype="float16", chunk_tokens=32)
        form = ObjectForm(Namespace(NamespaceId(1), SizeClassId(0), model, layout))
        assert form.checksums_in(page, KEY) == b""
    for at in range(0, 200, 5):
        spoiled = bytearray(page)
        spoiled[at] ^= 1
        assert FORM.checksums_in(bytes(spoiled), KEY) == b""


class Unkillable:
    """A process that hangs in the kernel."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.kills = 0

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "it would wait for ever"
        self.waits.append(timeout)
        raise subprocess.TimeoutExpired("store", timeout)

    def kill(self) -> None:
        self.kills += 1


def test_a_store_process_that_cannot_be_killed_is_left_behind() -> None:
    hanging = Unkillable()
    process._reap(cast("subprocess.Popen[bytes]", hanging))
    assert (hanging.waits, hanging.kills) == ([process.STOP_S, process.STOP_S], 1)
