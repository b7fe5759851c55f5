"""Token columns: the token ids of committed chunks, and the scope after those of each. Pure functions; any thread."""

import kvpool_native
from kvpool.errors import ProtocolError
from kvpool.ids import TOKEN_BYTES
from kvpool.keys import SCOPE_BYTES_MAX, is_scope


def check_tokens(tokens: bytes, scope: bytes, *, count: int, chunk_tokens: int) -> None:
    """Raises ProtocolError unless these are the token ids of `count` chunks, or none, and a scope."""
    chunk_bytes = TOKEN_BYTES * chunk_tokens
    if not is_scope(scope):
        raise ProtocolError(
            f"scope has {len(scope)} bytes, expected none or whole words, at most {SCOPE_BYTES_MAX} bytes"
        )
    if not tokens:
        return
    if len(tokens) != chunk_bytes * count or chunk_bytes + len(scope) > TOKEN_BYTES * kvpool_native.TOKEN_IDS_MAX:
        raise ProtocolError(f"tokens have {len(tokens)} bytes, expected none or {chunk_bytes * count}")


def with_scope(tokens: bytes, scope: bytes, chunk_tokens: int) -> bytes:
    """The token ids of whole chunks, with the scope after those of each."""
    if not tokens or not scope:
        return tokens
    chunk_bytes = TOKEN_BYTES * chunk_tokens
    return b"".join(tokens[at : at + chunk_bytes] + scope for at in range(0, len(tokens), chunk_bytes))
