"""Batches: many requests in one round trip, for chunks that form no chain and have a lease or a save each.

Any thread.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from kvpool.errors import ProtocolError
from kvpool.protocol import frames
from kvpool.protocol.records import batch as bm
from kvpool.protocol.records import messages as m
from kvpool_client.connection.session import Session

Answer = TypeVar("Answer")


def call_each(session: Session, requests: Sequence[object], answer: type[Answer]) -> list[Answer | None]:
    """The answer to each request; None where the daemon refused one of several. One round trip for BATCH_MAX of them. Raises as
    `call` does."""
    if len(requests) == 1:
        return [session.call(requests[0], answer)]
    answers: list[Answer | None] = []
    for bodies in _batches([m.encode(request, 0)[frames.LENGTH.size :] for request in requests]):
        batched = session.call(bm.Batch(bodies), bm.Batched).answers
        if len(batched) != len(bodies):
            raise ProtocolError(f"a batch of {len(bodies)} requests has {len(batched)} answers")
        answers += [_read(body, answer) for body in batched]
    return answers


def _batches(bodies: Sequence[bytes]) -> Iterator[list[bytes]]:
    """The requests in order, cut into batches that fit a frame."""
    batch: list[bytes] = []
    size = 0
    for body in bodies:
        if batch and (len(batch) == bm.BATCH_MAX or size + len(body) > bm.BATCH_BYTES_MAX):
            yield batch
            batch, size = [], 0
        batch.append(body)
        size += len(body)
    if batch:
        yield batch


def _read(body: object, answer: type[Answer]) -> Answer | None:
    if not isinstance(body, bytes):
        raise ProtocolError(f"a batch has an answer of {type(body).__name__}, expected bytes")
    kind, _, values = frames.decode(body)
    if kind == m.Failure.KIND:
        return None
    if kind != answer.KIND:  # type: ignore[attr-defined]  # every record has KIND
        raise ProtocolError(f"a batch has an answer of kind {kind}, expected {answer.__name__}")
    return m.decode_as(answer, values)
