"""Publisher of a daemon whose events nobody wants (`events.publish` is off): the null object of `EventPublisher`.

Binds nothing and has no thread, and its daemon does not load ZMQ. Any thread.
"""

from typing import ClassVar


class Unpublished:
    """See the module."""

    publish_endpoint: ClassVar[str] = "off"
    replay_endpoint: ClassVar[str] = "off"
    model_endpoints: ClassVar[dict[str, list[str]]] = {}

    def __repr__(self) -> str:
        return "<Unpublished>"

    def start(self) -> None:
        """Nothing is published."""

    def close_listeners(self) -> None:
        """Nobody listens."""

    def stop(self) -> None:
        """Nothing was started."""

    def let_in(self, clients: frozenset[bytes]) -> None:
        """No router connects."""
