"""Batches: requests that came together in one frame. Each is served by its own handler, in order, with other connections' turns
in between.

A refused one is answered with a Failure, and the next is served; a protocol error ends the connection as it does outside a
batch. Holds no state of its own. Control thread only.
"""

from collections.abc import Generator, Sequence
from typing import Any

from kvpool.errors import KVPoolError, ProtocolError, Refused
from kvpool.ids import TICKET_BYTES
from kvpool.index.parts import Parts
from kvpool.key_column import keys_in
from kvpool.layout import Layout
from kvpool.protocol import frames
from kvpool.protocol.records import batch as bm
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import promises as pr
from kvpool.server.connections.connection import Answer, Handler, Handlers


def serve_batch(handlers: Handlers, layout: Layout, request: bm.Batch) -> Parts[bm.Batched]:
    """The answers of all, to a connection of this layout. Raises ProtocolError, where possible before any is served."""
    if not 0 < len(request.requests) <= bm.BATCH_MAX:
        raise ProtocolError(f"a batch has {len(request.requests)} requests, expected 1..{bm.BATCH_MAX}")
    decoded = []
    for body in request.requests:
        decoded.append(_decode(handlers, body))
        yield None
    _check_answers([record for record, _ in decoded], layout)
    answers = []
    for record, handler in decoded:
        answer = yield from _serve(record, handler)
        answers.append(m.encode(answer, 0)[frames.LENGTH.size :])
        yield None
    return bm.Batched(answers)


def _decode(handlers: Handlers, body: object) -> tuple[Any, Handler]:
    if not isinstance(body, bytes):
        raise ProtocolError(f"a batch has a request of {type(body).__name__}, expected bytes")
    kind, _, values = frames.decode(body)
    if kind not in bm.BATCHED:
        raise ProtocolError(f"a batch has a request of kind {kind}, expected one of {sorted(bm.BATCHED)}")
    record, handler = handlers[kind]
    return m.decode_as(record, values), handler


def _check_answers(records: Sequence[Any], layout: Layout) -> None:
    """Answers about keys that were sent are shorter than these; leaves name thousands of chunks in 32 bytes."""
    leased = sum(
        max(0, layout.rows_of(record.chunks) - keys_in(record.keys))
        for record in records
        if isinstance(record, m.Acquire)
    )
    if leased > bm.BATCH_LEAF_CHUNKS_MAX:
        raise ProtocolError(f"a batch asks for {leased} chunks by leaves, expected at most {bm.BATCH_LEAF_CHUNKS_MAX}")
    promised = sum(
        max(0, layout.rows_of(record.chunks)) + TICKET_BYTES * max(0, record.tickets)
        for record in records
        if isinstance(record, pr.Promise)
    )
    if promised > bm.BATCH_PROMISE_BYTES_MAX:
        raise ProtocolError(
            f"a batch asks for promises of {promised} bytes, expected at most {bm.BATCH_PROMISE_BYTES_MAX}"
        )


def _serve(record: Any, handler: Handler) -> Parts[Answer]:
    try:
        answer = handler(record)
        return (yield from answer) if isinstance(answer, Generator) else answer
    except ProtocolError:
        raise
    except Refused as error:
        return m.Failure(error.code, error.message)
    except KVPoolError as error:
        return m.Failure("refused", str(error))
