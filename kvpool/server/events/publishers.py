"""Event publishers: one for all models, and one more for each model that has an endpoint of its own.

A reader that counts the messages of an endpoint, and takes all of them for one model, is behind one of the latter. Threads: as
of `EventPublisher`.
"""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from kvpool.clock import Clock, wall_time_s
from kvpool.config.event_options import EventsConfig
from kvpool.server.events.publisher import EventPublisher
from kvpool.server.events.source import EventSource


class EventPublishers:
    """See the module: the publisher of all models, and those of one each, as one. Counters are sums."""

    def __init__(
        self,
        config: EventsConfig,
        make_source: Callable[[], EventSource],
        *,
        socket_mode: int,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Raises OSError or ConfigError; then nothing is bound. REQUIRES: `config.publish`."""
        self._all: list[EventPublisher] = []
        endpoints = [
            ("", config.publish, config.replay),
            *((one.model, one.publish, one.replay) for one in config.models),
        ]
        try:
            for model, publish, replay in endpoints:
                publisher = EventPublisher(
                    replace(config, publish=publish, replay=replay),
                    make_source(),
                    host=socket.gethostname(),
                    socket_mode=socket_mode,
                    wall_time_s=wall_time_s,
                    clock=clock,
                    loop=loop,
                    model=model,
                )
                self._all.append(publisher)
        except BaseException:
            self.close_listeners()
            self.stop()
            raise
        self._of_models = dict(zip((one.model for one in config.models), self._all[1:], strict=True))

    def __repr__(self) -> str:
        return f"<EventPublishers of all and of {len(self._of_models)} models>"

    @property
    def publish_endpoint(self) -> str:
        """Endpoint at which events of all models are published."""
        return self._all[0].publish_endpoint

    @property
    def replay_endpoint(self) -> str:
        """Endpoint at which events of all models are sent again."""
        return self._all[0].replay_endpoint

    @property
    def model_endpoints(self) -> dict[str, list[str]]:
        """The endpoints of each model that has its own: for subscribers, and for replays ("off": none)."""
        return {model: [one.publish_endpoint, one.replay_endpoint or "off"] for model, one in self._of_models.items()}

    def start(self) -> None:
        """See `EventPublisher`."""
        for one in self._all:
            one.start()

    def wake(self) -> None:
        """See `EventPublisher`."""
        for one in self._all:
            one.wake()

    def close_listeners(self) -> None:
        """See `EventPublisher`."""
        for one in self._all:
            one.close_listeners()

    def stop(self) -> None:
        """See `EventPublisher`."""
        for one in self._all:
            one.stop()

    def let_in(self, clients: frozenset[bytes]) -> None:
        """See `EventPublisher`."""
        for one in self._all:
            one.let_in(clients)

    def problems(self) -> list[str]:
        """See `EventPublisher`."""
        return [problem for one in self._all for problem in one.problems()]

    def stats(self) -> dict[str, int]:
        """See `EventPublisher`."""
        counted: Counter[str] = Counter()
        for one in self._all:
            counted.update(one.stats())
        return dict(counted)
