"""Requests that came together in a Batch: each is served by its own handler, in order, with everybody else's turns in between.

One that is refused is answered so, and the next is served; what is against the protocol ends the connection as it does alone.
Holds no state of its own. Control thread only.
"""

from collections.abc import Generator

from kvpool.errors import KVPoolError, ProtocolError
from kvpool.index.parts import Parts
from kvpool.protocol import batch_messages as bm
from kvpool.protocol import frames
from kvpool.protocol import messages as m
from kvpool.server.connection import Answer, Handlers


def serve_batch(handlers: Handlers, request: bm.Batch) -> Parts[bm.Batched]:
    """The answers of all. Raises ProtocolError."""
    if not 0 < len(request.requests) <= bm.BATCH_MAX:
        raise ProtocolError(f"a batch has {len(request.requests)} requests, expected 1..{bm.BATCH_MAX}")
    answers = []
    for body in request.requests:
        answer = yield from _serve(handlers, body)
        answers.append(m.encode(answer, 0)[frames.LENGTH.size :])
        yield None
    return bm.Batched(answers)


def _serve(handlers: Handlers, body: object) -> Parts[Answer]:
    if not isinstance(body, bytes):
        raise ProtocolError(f"a batch has a request of {type(body).__name__}, expected bytes")
    kind, _, values = frames.decode(body)
    if kind not in bm.BATCHED:
        raise ProtocolError(f"a batch has a request of kind {kind}, expected one of {sorted(bm.BATCHED)}")
    record, handler = handlers[kind]
    decoded = m.decode_as(record, values)
    try:
        answer = handler(decoded)
        return (yield from answer) if isinstance(answer, Generator) else answer
    except ProtocolError:
        raise
    except KVPoolError as error:
        return m.Failure("refused", str(error))
