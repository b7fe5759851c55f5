"""Token names: a daemon learns the token ids of chunks that it takes from another node or a shared store.

These give bytes alone. Without the ids no router is sent an event of such a chunk, nor of what is saved behind it. Any thread.
"""

import kvpool_native
from kvpool.ids import TOKEN_BYTES
from kvpool.key_column import KeyColumn
from kvpool.protocol.records import one_way
from kvpool.protocol.records.messages import COMMIT_BYTES_MAX
from kvpool.states import PEER
from kvpool_client.connection.session import Session
from kvpool_client.verbs.results import Hit


def name_tokens(session: Session | None, hit: Hit, levels: bytes) -> None:
    """Name the token ids of those leased chunks that are on their way. `levels`: of the leading chunks of a hit, as leased."""
    first, end = levels.find(PEER), levels.rfind(PEER) + 1
    if session is None or first < 0 or not session.welcome.keeps_tokens:
        return
    words = hit.keys.chunk_tokens + len(hit.keys.scope) // TOKEN_BYTES
    if words > kvpool_native.TOKEN_IDS_MAX:
        return
    columns = [KeyColumn(column) for column in hit.keys.columns()]
    chunk_bytes = TOKEN_BYTES * hit.keys.chunk_tokens + sum(len(column[0]) for column in columns)
    most = min(one_way.NAMED_MAX, (COMMIT_BYTES_MAX - len(hit.keys.scope)) // chunk_bytes)
    for at in range(first, end, most):
        part = slice(at, min(at + most, end))
        tokens = hit.keys.token_ids(range(part.start, part.stop))
        if tokens:
            keys = b"".join(column[part].packed for column in columns)
            session.notify(one_way.NameTokens(keys, tokens, hit.keys.scope))
