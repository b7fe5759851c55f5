"""Generated frames against the decoder: each is a record or a ProtocolError, in little time and memory."""

import contextlib
import gc
import resource
import time
from collections.abc import Iterator

import msgpack
import pytest

from kvpool.errors import ProtocolError
from kvpool.protocol import frames
from kvpool.protocol.records import codec
from kvpool.protocol.records import messages as m
from tests.hostile.conftest import Campaign
from tests.hostile.rigs.frames_generator import RECORDS, FramesGenerator
from tests.hostile.rigs.recorded_traffic import record_session
from tests.rigs.daemon import Daemon

BY_KIND = {record.KIND: record for record in RECORDS}
FRAME_S_MAX = 0.25
GROWTH_BYTES_MAX = 48 << 20


def _decode(body: bytes) -> bool:
    """True if the body is a record. Lets any exception but ProtocolError through."""
    try:
        kind, _, values = frames.decode(body)
        record = BY_KIND.get(kind)
        if record is None:
            return False
        decoded = m.decode_as(record, values)
    except ProtocolError:
        return False
    assert type(decoded) is record
    for value, expected in zip(values, codec.field_types(record), strict=True):
        assert type(value) is expected
    return True


@contextlib.contextmanager
def _garbage_left_alone() -> Iterator[None]:
    """Without searches for garbage among all that other tests have left, which take longer than any frame."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@pytest.mark.slow
def test_every_generated_frame_is_a_record_or_a_protocol_error(
    shared_daemon: Daemon, campaign: Campaign, seed: int
) -> None:
    count = campaign.pick(100_000, 1_000_000)
    generator = FramesGenerator(seed, record_session(shared_daemon))
    for _ in range(count // 20):
        _decode(generator.body())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    good, slowest_s, started_s = 0, 0.0, time.perf_counter()
    with _garbage_left_alone():
        for _ in range(count):
            body = generator.body()
            begun_s = time.thread_time()
            good += _decode(body)
            slowest_s = max(slowest_s, time.thread_time() - begun_s)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    seconds = time.perf_counter() - started_s
    print(f"{count} frames in {seconds:.1f} s, {good} were records, slowest {slowest_s * 1e3:.2f} ms, grown {grown} B")
    assert 0.1 * count < good < 0.9 * count, "the generator sends both"
    assert slowest_s < FRAME_S_MAX
    assert grown < GROWTH_BYTES_MAX


def test_a_stream_cut_anywhere_gives_the_same_frames(seed: int, campaign: Campaign) -> None:
    generator = FramesGenerator(seed)
    for _ in range(campaign.pick(100, 10_000)):
        stream = b"".join(generator.frame() for _ in range(generator.chance.randrange(1, 8)))
        whole, pieces = _read(stream, len(stream) + 1), _read(stream, generator.chance.choice((1, 3, 64, 1000)))
        assert whole == pieces


def _read(stream: bytes, size: int) -> tuple[list[str], bool]:
    """The frames of a stream that arrives in pieces, packed again (nan is not itself), and whether it ended in an error."""
    reader, received = frames.FrameReader(), []
    try:
        for at in range(0, len(stream), size):
            for kind, sequence, values in reader.feed(stream[at : at + size]):
                received.append(f"{kind} {sequence} {msgpack.packb(values)!r}")
    except ProtocolError:
        return received, True
    return received, False
