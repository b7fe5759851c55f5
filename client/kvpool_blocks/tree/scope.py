"""Scope: what separates the prefixes of different tenants and adapters. Immutable."""

from dataclasses import dataclass

import kvpool_native


@dataclass(frozen=True, slots=True)
class Scope:
    """`salt` None: the Pool's own."""

    salt: bytes | None = None
    adapter: str = ""

    def root_key(self, tokens_per_block: int) -> bytes:
        """The key of the tree's root for this scope."""
        salt = b"" if self.salt is None else b"salt" + self.salt
        size = tokens_per_block.to_bytes(4, "little")
        return kvpool_native.derive_root([b"kvpool block tree", size, salt, self.adapter.encode()])
