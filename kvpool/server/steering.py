"""Verbs about the process rather than its pool: its log level, and reading its configuration again.

Control thread only.
"""

from collections.abc import Callable

from kvpool.config.config import OPTIONS
from kvpool.errors import ConfigError, InvalidArgument, Refused
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import operator as om
from kvpool.protocol.verbs import OPERATOR, verb
from kvpool.server.connections.audit import audit, audited
from kvpool.server.connections.local_socket import Peer
from kvpool.server.reload import Reload

LOG_LEVEL = "log.level"


class SteeringVerbs:
    """The requests of the operator `peer`."""

    def __init__(self, reload: Reload, peer: Peer, drain: Callable[[bool], bool]) -> None:
        """`drain` has the daemon decline new saves or take them again, and returns what it did before."""
        self._reload = reload
        self._drain = drain
        self.peer = peer

    @verb(om.LogLevel, roles=OPERATOR)
    def log_level(self, request: om.LogLevel) -> m.Report:
        """Log from another level on, or say from which."""
        before = self._reload.config.log.level
        if request.level:
            audit(self.peer, "log-level", level=request.level)
            try:
                self._reload.change(LOG_LEVEL, OPTIONS[LOG_LEVEL].parse(request.level))
            except InvalidArgument as error:
                expected = OPTIONS[LOG_LEVEL].expected
                raise Refused("argument", f"the log level is {request.level!r}, expected {expected}") from error
        return m.Report({"level": self._reload.config.log.level, "before": before})

    @verb(om.AskConfig, roles=OPERATOR)
    def config(self, _request: om.AskConfig) -> m.Report:
        """The configuration in force."""
        settings = self._reload.config.settings
        return m.Report(
            {"options": {name: {"value": one.value, "source": one.source} for name, one in settings.items()}}
        )

    @verb(om.Reload, roles=OPERATOR)
    @audited("reload")
    async def reload(self, _request: om.Reload) -> m.Report:
        """Read the configuration again; all or nothing of it takes effect."""
        try:
            return m.Report((await self._reload.run()).to_report())
        except ConfigError as error:
            raise Refused("config", "nothing is changed: " + "; ".join(error.faults)) from error

    @verb(om.Drain, roles=OPERATOR)
    @audited("drain", "is_on")
    def drain(self, request: om.Drain) -> m.Report:
        """Decline new saves, or take them again."""
        return m.Report({"before": self._drain(request.is_on), "drained": request.is_on})
