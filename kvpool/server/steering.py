"""Handlers of requests about the process rather than its pool: its log level, and reading its configuration again.

Control thread only.
"""

from functools import partial

from kvpool.config.config import OPTIONS
from kvpool.errors import ConfigError, InvalidArgument, Refused
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import operator as om
from kvpool.server.connections.audit import audit, audited
from kvpool.server.connections.connection import Handler
from kvpool.server.connections.local_socket import Peer
from kvpool.server.reload import Reload

LOG_LEVEL = "log.level"


def steering_handlers(reload: Reload, peer: Peer) -> dict[type, Handler]:
    """The requests of an operator, who is `peer`."""
    return {
        om.LogLevel: partial(_log_level, reload, peer),
        om.Reload: audited(peer, "reload", partial(_reload, reload)),
    }


def _log_level(reload: Reload, peer: Peer, request: om.LogLevel) -> m.Report:
    before = reload.config.log.level
    if request.level:
        audit(peer, "log-level", level=request.level)
        try:
            reload.change(LOG_LEVEL, OPTIONS[LOG_LEVEL].parse(request.level))
        except InvalidArgument as error:
            expected = OPTIONS[LOG_LEVEL].expected
            raise Refused("argument", f"the log level is {request.level!r}, expected {expected}") from error
    return m.Report({"level": reload.config.log.level, "before": before})


async def _reload(reload: Reload, _request: om.Reload) -> m.Report:
    try:
        return m.Report((await reload.run()).to_report())
    except ConfigError as error:
        raise Refused("config", "nothing is changed: " + "; ".join(error.faults)) from error
