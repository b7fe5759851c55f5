"""Numbers of namespaces in the catalogue. Rows have them, so they stay the same over restarts. Control thread only."""

import logging

import numpy as np
import numpy.typing as npt

from kvpool.errors import KVPoolError
from kvpool.index.namespaces import Namespace, Namespaces
from kvpool.layout import Layout
from kvpool.tiers.ssd.catalogue.identity import NamespaceRecord
from kvpool.types import NamespaceId

log = logging.getLogger(__name__)


class NamespaceNumbers:
    """The number of each namespace that has had a row in this process or the one before."""

    def __init__(self) -> None:
        self._of: dict[NamespaceId, int] = {}
        self._next = 1

    def __repr__(self) -> str:
        return f"<NamespaceNumbers of {len(self._of)}>"

    def find(self, namespace: Namespace) -> int | None:
        """The number of a namespace, if it has one."""
        return self._of.get(namespace.id)

    def give(self, namespace: Namespace) -> int:
        """Give a namespace a number that none has had."""
        number = self._of[namespace.id] = self._next
        self._next += 1
        return number

    def take(self, namespace: Namespace) -> int | None:
        """Take back the number of a namespace, if it had one. It is not used again."""
        return self._of.pop(namespace.id, None)

    def reopen(
        self, recovered: dict[int, NamespaceRecord], rows: "npt.NDArray[np.void]", namespaces: Namespaces
    ) -> tuple[dict[int, Namespace], list[int]]:
        """Namespaces of earlier processes that have rows, by number, and the numbers of those without rows.

        Joins them for the caller, who leaves them after their chunks were restored.
        """
        with_rows = set(np.unique(rows["namespace"]).tolist())
        reopened: dict[int, Namespace] = {}
        for number, (model, wire) in recovered.items():
            self._next = max(self._next, number + 1)
            if number not in with_rows:
                continue
            try:
                reopened[number] = namespaces.open(model, Layout.from_wire(wire))
            except KVPoolError as error:
                log.warning("chunks of model %s are not restored: %s", model, error)
            else:
                self._of[reopened[number].id] = number
                namespaces.join([reopened[number]])
        return reopened, [number for number in recovered if number not in with_rows]
