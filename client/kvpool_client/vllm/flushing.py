"""Flush of one model's chunks, as an operator would do it: a connection of its own, one request. Any thread."""

from kvpool.errors import KVPoolError
from kvpool.protocol.blocking import BlockingConnection
from kvpool_client.vllm.settings import Settings


def flush_model(settings: Settings, model: str) -> str:
    """Drop every chunk of the model, of all its shards, salts and adapters. Empty, or why that could not be done."""
    try:
        with BlockingConnection.admin(settings.socket, settings.timeout_s) as connection:
            connection.flush(model, None)
    except (KVPoolError, OSError) as error:
        return str(error)
    return ""
