"""Services behind a control server: what a node has that others ask for. Called on the loop."""

from collections.abc import Callable
from typing import Protocol

from kvpool.peers.control import records as r
from kvpool.peers.control.pullers import Puller


class PullService(Protocol):
    """The owner's side of pulls. Called on the loop; nothing here may take long."""

    def serve(self, puller: Puller, pull: r.Pull, answer: Callable[[r.Offer | r.Refused], bool]) -> None:
        """Answer a pull, now or later. `answer` returns whether the answer was sent: what a lost Offer holds has to be
        released."""
        ...

    def stage(self, puller: Puller, stage: r.AnyStage, answer: Callable[[r.Staged | r.Refused], bool]) -> None:
        """Copy rows of a pull to where TransferEngine can read them, or have NIXL write them, now or later."""
        ...

    def near(self, puller: Puller, ask: r.AskNear) -> r.Near | r.Refused:
        """Where the chunks of a pull are in this node's memory, for a puller on the same host."""
        ...

    def check(self, puller: Puller, wrong: r.Wrong) -> None:
        """A chunk came to the puller with wrong bytes."""
        ...

    def release(self, puller: Puller, pull: int) -> None:
        """The puller needs the chunks of a pull no longer. It may be an unknown one, or one that was not answered yet."""
        ...

    def forget(self, puller: Puller) -> None:
        """The connection has ended: everything held for it is released."""
        ...


class FollowService(Protocol):
    """The owner's side of following: which chunks this node has. Called on the loop; nothing here may take long.

    Each request gets one answer, now or later; `answer` returns whether it was sent. A connection has one at a time.
    """

    def changes(self, puller: Puller, ask: r.AskChanges, answer: Callable[[r.Changes | r.Refused], bool]) -> None:
        """Which chunks have come and gone since an event."""
        ...

    def keys(self, puller: Puller, ask: r.AskKeys, answer: Callable[[r.Keys | r.Refused], bool]) -> None:
        """A page of the keys that this node has."""
        ...

    def forget(self, puller: Puller) -> None:
        """The connection has ended: its request needs no answer."""
        ...
