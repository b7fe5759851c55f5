"""kvpool: a multi-tier KV cache pool. This package is the daemon; engines use `kvpool_client`."""

from kvpool._version import VERSION as __version__

__all__ = ["__version__"]
