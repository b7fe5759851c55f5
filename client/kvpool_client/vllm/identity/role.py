"""Role of a connector (vLLM's `kv_role`): a producer for others loads nothing, a consumer of others' KV saves nothing.

Under a MultiConnector each child has a role of its own. Immutable; any thread.
"""

from dataclasses import dataclass

PRODUCER, CONSUMER = "kv_producer", "kv_consumer"


@dataclass(frozen=True, slots=True)
class Role:
    """See the module."""

    may_load: bool = True
    may_save: bool = True

    @classmethod
    def of(cls, kv_role: object) -> "Role":
        """The role of a name of vLLM's; no name is both."""
        return cls(may_load=kv_role != PRODUCER, may_save=kv_role != CONSUMER)


BOTH = Role()
