"""Restoring: chunks of the node's pool on their way into a request's blocks, with the lease that they need.

Ends once: finished (the verified tokens count) or cancelled (no byte is written any more, nothing counts). Used from one
thread at a time, as the Load behind it.
"""

from dataclasses import dataclass

from kvpool_client.torch.restored import Restored
from kvpool_client.verbs.lease import Lease
from kvpool_client.verbs.load import Load


@dataclass(frozen=True, slots=True)
class Restoring:
    """A load under way; `restored` is what the engine waits on. `epoch`: of the daemon that it comes from."""

    restored: Restored
    lease: Lease
    load: Load
    epoch: bytes

    def finish(self) -> int:
        """Wait for the load, bounded by the Pool's timeout without progress, and end the lease. Returns the tokens in place."""
        tokens = self.restored.finish_load()
        self.lease.release()
        return tokens

    def cancel(self) -> None:
        """End the load and the lease; when it has returned, no byte is written to the blocks."""
        self.load.cancel()
        self.finish()

    @property
    def has_ended(self) -> bool:
        """Whether `finish` returns at once."""
        return self.load.done()
