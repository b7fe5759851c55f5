"""Pool of an engine: a connection under its model's name, of the scheduler's half or of a rank. Any thread."""

from kvpool.layout import Layout
from kvpool.layouts.share import Share
from kvpool_client.engines.connection_name import connection_name
from kvpool_client.pool import Pool, connect
from kvpool_client.vllm.settings import Settings


def engine_pool(
    settings: Settings,
    layout: Layout,
    share: Share | tuple[Share, ...] | None,
    *,
    model: str,
    revision: str,
) -> Pool:
    """A Pool at the daemon that the settings name."""
    return connect(
        settings.socket,
        model=model,
        revision=revision,
        layout=layout,
        timeout_s=settings.timeout_s,
        copy_threads=settings.copy_threads,
        share=share,
        name=connection_name("vllm", layout.rank, layout.world),
    )
