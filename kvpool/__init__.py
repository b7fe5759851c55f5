"""kvpool: a multi-tier KV cache pool. This package is the daemon; engines use `kvpool_client`."""

__version__ = "0.1.0"
