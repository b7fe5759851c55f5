"""Resource manager: what an executor asks of any resource of requests, as TensorRT-LLM's class. Engine's thread."""

from abc import ABC, abstractmethod
from typing import Any

from kvpool_blocks.executor.dummy_request import DummyRequest


class BaseResourceManager(ABC):
    """What an executor asks of any resource of requests; TensorRT-LLM's class of this name."""

    @abstractmethod
    def get_max_resource_count(self) -> int:
        """All there is."""

    @abstractmethod
    def get_needed_resource_to_completion(self, request: Any) -> int:
        """What the request needs from its beginning to its end."""

    def add_dummy_requests(self, request_ids: list[int]) -> list[DummyRequest] | None:  # noqa: ARG002 - the interface
        """Requests that are there for their resources alone; None where there is no room, or nothing to prepare."""
        return None

    @abstractmethod
    def prepare_resources(self, scheduled_batch: Any) -> list[Any]:
        """Before a step; the requests without room."""

    @abstractmethod
    def update_resources(self, scheduled_batch: Any) -> None:
        """After a step."""

    @abstractmethod
    def free_resources(self, request: Any) -> None:
        """A request ends, or is paused."""

    @abstractmethod
    def shutdown(self) -> None:
        """The executor ends."""
