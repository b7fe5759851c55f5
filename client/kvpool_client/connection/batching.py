"""Batches: many requests in one round trip, for chunks that form no chain and have a lease or a save each.

A daemon with an earlier protocol version gets the requests one by one. Any thread.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from kvpool.errors import ProtocolError, Refused
from kvpool.protocol import frames, versions
from kvpool.protocol.records import batch as bm
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way
from kvpool_client.connection.session import Session

Answer = TypeVar("Answer")


def call_each(session: Session, requests: Sequence[object], answer: type[Answer]) -> list[Answer | None]:
    """The answer to each request; None where the daemon refused one. One round trip for BATCH_MAX of them. Raises as `call`
    does."""
    if session.welcome.protocol < versions.SINCE[bm.Batch]:
        return [_alone(session, request, answer) for request in requests]
    answers: list[Answer | None] = []
    for bodies in _batches([m.encode(request, 0)[frames.LENGTH.size :] for request in requests]):
        batched = session.call(bm.Batch(bodies), bm.Batched).answers
        if len(batched) != len(bodies):
            raise ProtocolError(f"a batch of {len(bodies)} requests has {len(batched)} answers")
        answers += [_read(body, answer) for body in batched]
    return answers


def drop_leases(session: Session, leases: Sequence[int]) -> None:
    """Have the daemon end leases. Does not wait, unless this version of the daemon answers; raises as `call` does."""
    if session.welcome.protocol < versions.SINCE[one_way.DropLeases]:
        for lease in leases:
            session.drop_lease(lease)
        return
    for first in range(0, len(leases), m.RENEWALS_MAX):
        column = np.array(leases[first : first + m.RENEWALS_MAX], dtype="<u8").tobytes()
        session.notify(one_way.DropLeases(column))


def _alone(session: Session, request: object, answer: type[Answer]) -> Answer | None:
    try:
        return session.call(request, answer)
    except Refused:
        return None


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
