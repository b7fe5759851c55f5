"""Keys: the root of a chain of chunk keys, made from a namespace, and its scope, the part that may be published.

The root includes everything that makes KV of equal tokens differ, so that chunks of different namespaces never have equal keys.
Hashing itself is native (`kvpool_native`): `leaf = H(tokens)`, `key = H(parent key, leaf)`, H = BLAKE3 with a key of its own
for each use.

The scope shows readers of events, who see no roots, which chunks of equal tokens differ by adapter or salt. It follows a
chunk's token ids wherever these are stored:

    scope := nothing  |  salt tag (SALT_TAG_BYTES; zeros: no salt), then the adapter in UTF-8, zeros up to a whole word

Of a salt only the tag leaves the client. Pure functions; any thread.
"""

from typing import NamedTuple

import kvpool_native
from kvpool.layout import Layout

KEY_FORMAT_VERSION = 1
SALT_TAG_BYTES = 16
DOMAIN_TAG_BYTES = 16
ADAPTER_BYTES_MAX = 240
SCOPE_BYTES_MAX = SALT_TAG_BYTES + ADAPTER_BYTES_MAX
_WORD_BYTES = 4
_NO_SALT = bytes(SALT_TAG_BYTES)
assert SCOPE_BYTES_MAX % _WORD_BYTES == 0


class Scope(NamedTuple):
    """Scope that separates chunks of equal tokens, model and layout. Both empty: no separation."""

    adapter: str = ""
    salt_tag: bytes = b""


def domain_key(secret: bytes) -> bytes:
    """The 32-byte key of a trust domain, from its secret (empty: the default domain)."""
    return kvpool_native.derive_root([b"kvpool trust domain", secret])


DEFAULT_DOMAIN = domain_key(b"")


def domain_tag(domain: bytes) -> bytes:
    """The tag of a trust domain, from its key: other nodes compare it, and no chunk key can be computed from it."""
    return kvpool_native.derive_root([b"kvpool domain tag", domain])[:DOMAIN_TAG_BYTES]


def root_key(domain: bytes, *, model: str, adapter: str, salt: bytes, layout: Layout) -> bytes:
    """`key_{-1}` of a chain: 32 bytes over format version, domain, model, adapter, salt and layout fingerprint.

    Every field is length-prefixed by the native module, so no two sets of fields give the same input.
    """
    version = KEY_FORMAT_VERSION.to_bytes(4, "little")
    fields = [b"kvpool root", version, domain, model.encode(), adapter.encode(), salt, layout.fingerprint()]
    return kvpool_native.derive_root(fields)


def namespace_name(model: str, revision: str) -> str:
    """The name under which a model's chunks are stored: `model@revision`, or the model's own where no revision is named."""
    return f"{model}@{revision}" if revision else model


def name_without_revision(namespace: str) -> str:
    """The model's own name in that of its namespace: what is before the last @."""
    return namespace.rpartition("@")[0] or namespace


def namespace_fingerprint(model: str, layout: Layout) -> bytes:
    """32 bytes over model and layout: how a slot on disk names the namespace of its chunk."""
    return kvpool_native.derive_root([b"kvpool namespace", model.encode(), layout.fingerprint()])


def salt_tag(salt: bytes) -> bytes:
    """The public tag of a salt: one for each salt, from which the salt cannot be computed.

    A guessed salt can be verified with it. Empty for no salt.
    """
    return kvpool_native.derive_root([b"kvpool salt tag", salt])[:SALT_TAG_BYTES] if salt else b""


def pack_scope(adapter: str, salt: bytes) -> bytes:
    """The scope of chunks with this adapter and salt. A name of more than ADAPTER_BYTES_MAX bytes is cut."""
    if not adapter and not salt:
        return b""
    name = adapter.encode("utf-8", "replace")[:ADAPTER_BYTES_MAX]
    return (salt_tag(salt) or _NO_SALT) + name + bytes(-len(name) % _WORD_BYTES)


def is_scope(column: bytes) -> bool:
    """Whether these bytes are a valid scope."""
    return not column or (SALT_TAG_BYTES <= len(column) <= SCOPE_BYTES_MAX and len(column) % _WORD_BYTES == 0)


def split_scope(words: bytes, token_bytes: int) -> tuple[bytes, Scope]:
    """The token ids, and the scope after them. With fewer than `token_bytes`, both are unknown."""
    tokens, packed = words[:token_bytes], words[token_bytes:]
    if len(tokens) < token_bytes or not is_scope(packed):
        return b"", Scope()
    tag = packed[:SALT_TAG_BYTES]
    adapter = packed[SALT_TAG_BYTES:].rstrip(b"\0").decode("utf-8", "replace")
    return tokens, Scope(adapter, b"" if tag == _NO_SALT else tag)
