"""Limit of file descriptors, and the number of connections that fit it. Main thread, at the start."""

import logging
import resource

from kvpool.config.config import Config
from kvpool.errors import ConfigError
from kvpool.pool.lower_tiers import plan_lower_tiers

log = logging.getLogger(__name__)

# Descriptors of the daemon itself: memory, sockets, pipes, logs, its catalogue, connections of HTTP and ZMQ. A running one has
# 30 to 60.
OWN_DESCRIPTORS = 192
CONNECTIONS_MIN = 8


def raise_limit() -> int:
    """Raise the process's limit as far as it may be raised; the limit then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def fit_connections(config: Config, limit: int) -> int:
    """`server.max_connections`, or as many as fit the limit beside the segment files, with a warning.

    Raises ConfigError where only a few fit.
    """
    plans = plan_lower_tiers(config)
    segments = sum(plan.descriptors for plan in plans)
    each = 2 if config.server.staging_bytes else 1
    wanted = config.server.max_connections
    needed = OWN_DESCRIPTORS + segments + each * wanted
    if needed <= limit:
        return wanted
    fitting = (limit - OWN_DESCRIPTORS - segments) // each
    what = (
        f"server.max_connections is {wanted}, which takes {needed} file descriptors with {segments} segment files, "
        f"and the process may have {limit} (LimitNOFILE= of the unit, ulimit -n)"
    )
    if fitting < min(CONNECTIONS_MIN, wanted):
        raise ConfigError(
            [f"{what}: {', or '.join(['raise the limit', *(plan.descriptors_option for plan in plans)])}"]
        )
    log.warning(
        "%s: %d connections are served at a time; raise the limit, or lower server.max_connections", what, fitting
    )
    return fitting
