"""Load plan: which blocks of vLLM's a promised hit is written into. Pure; the scheduler's thread."""

from kvpool_client.connection.promise_line import Promise
from kvpool_client.vllm.identity.geometry import Geometry
from kvpool_client.vllm.identity.parts import NULL_BLOCK, Part
from kvpool_client.vllm.plan import LoadOrder
from kvpool_client.vllm.surface import EngineBlocks


def load_order(
    request_id: str,
    blocks: EngineBlocks,
    promise: Promise,
    *,
    geometry: Geometry,
    tokens: range,
    is_async: bool,
) -> LoadOrder:
    """The order to load `tokens`, which are what vLLM counts on behind those that it has.

    Without a promise the order still names every block, so that the worker can report that they never came.
    """
    size = geometry.chunk_tokens
    first, chunks = tokens.start // size, promise.chunks or -(-tokens.stop // size)
    tables = blocks.get_block_ids()
    return LoadOrder(
        request_id=request_id,
        tickets=promise.tickets,
        first_chunk=first,
        chunks=chunks,
        block_ids=tuple(
            _targets(part, tables[part.table], _chunks_of(part, first, chunks), geometry=geometry, tokens=tokens)
            for part in geometry.parts
        ),
        tiers=promise.tiers[first:],
        is_async=is_async,
        may_be_cut=geometry.may_cut_hits,
    )


def failing_order(request_id: str, blocks: EngineBlocks, *, geometry: Geometry, is_async: bool) -> LoadOrder:
    """An order that can only fail, with every block of the request."""
    tables = tuple(tuple(table) for table in blocks.get_block_ids())
    return LoadOrder(request_id, (), 0, 1, tables, b"", is_async, geometry.may_cut_hits)


def _chunks_of(part: Part, first: int, chunks: int) -> range:
    """The chunks that a load writes: of a full part those that vLLM has not, of others the last ones, as far as it has none."""
    return range(first, chunks) if part.is_full else range(max(0, chunks - part.run), chunks)


def _targets(part: Part, table: list[int], chunks: range, *, geometry: Geometry, tokens: range) -> tuple[int, ...]:
    """The block for each block of the chunks, −1 where vLLM has it, or has let it go because no window reaches back to it."""
    low, high = tokens.start // part.block_tokens, tokens.stop // part.block_tokens
    if part.is_full:  # its blocks are one row of the table
        begin, end = geometry.places_of(part, chunks.start).start, geometry.places_of(part, chunks.stop - 1).stop
        wanted = range(max(low, begin), min(high, end))
        if wanted and wanted.stop > len(table):
            raise IndexError(f"a block table has {len(table)} blocks, expected {wanted.stop} for {tokens.stop} tokens")
        before = min(wanted.start, end) - begin
        taken = table[wanted.start : wanted.stop]
        return (*(-1,) * before, *taken, *(-1,) * (end - begin - before - len(taken)))
    return tuple(
        table[place] if low <= place < high and table[place] != NULL_BLOCK else -1
        for chunk in chunks
        for place in geometry.places_of(part, chunk)
    )
