"""Where a chain of chunk keys begins: the root of a namespace.

The root binds everything that makes KV of equal tokens differ, so that chunks of different namespaces can
never meet. Hashing itself is native (`kvpool_native`): `leaf = H(tokens)`, `key = H(parent key, leaf)`, H = BLAKE3
with a key of its own for each use. Pure functions; any thread.
"""

import kvpool_native
from kvpool.layout import Layout

KEY_FORMAT_VERSION = 1


def domain_key(secret: bytes) -> bytes:
    """The 32-byte key of a trust domain, from its secret (empty: the default domain)."""
    return kvpool_native.derive_root([b"kvpool trust domain", secret])


DEFAULT_DOMAIN = domain_key(b"")


def root_key(domain: bytes, *, model: str, adapter: str, salt: bytes, layout: Layout) -> bytes:
    """`key_{-1}` of a chain: 32 bytes over format version, domain, model, adapter, salt and layout fingerprint.

    Every field is length-prefixed by the native module, so no two sets of fields give the same input.
    """
    version = KEY_FORMAT_VERSION.to_bytes(4, "little")
    fields = [b"kvpool root", version, domain, model.encode(), adapter.encode(), salt, layout.fingerprint()]
    return kvpool_native.derive_root(fields)


def namespace_fingerprint(model: str, layout: Layout) -> bytes:
    """32 bytes over model and layout: how a slot on disk names the namespace of its chunk."""
    return kvpool_native.derive_root([b"kvpool namespace", model.encode(), layout.fingerprint()])
