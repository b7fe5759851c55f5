"""Settings of LMCache's plug-in: the content of `adapter_params` in `--l2-adapter`. Pure; any thread."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool.socket_path import find_socket
from kvpool_client.engines.settings import read_settings, seconds

# LMCache frees a load's objects after 300 s and a store's after 600 s (its L1's locks, by default), and may give their bytes to
# others. A task ends long before that, with the last requests and a copy behind its deadline.
TASK_TIMEOUT_MAX_S = 120.0
_OWN = {"task_timeout_s": seconds(most=TASK_TIMEOUT_MAX_S), "lock_timeout_s": seconds()}


@dataclass(frozen=True, slots=True)
class Settings:
    """`revision` stands for the weights of every model that this LMCache serves; empty: they are found. `timeout_s` bounds a
    round trip, and a lookup from its submission on; `task_timeout_s` a store or load; `lock_timeout_s` a lock that LMCache does
    not end. `priority`: that of what is stored; None: the pool's default.
    """

    socket: str = field(default_factory=find_socket)
    revision: str = ""
    salt: str = ""
    timeout_s: float = 1.0
    task_timeout_s: float = 10.0
    lock_timeout_s: float = 30.0
    copy_threads: int = 2
    priority: int | None = None

    @classmethod
    def read(cls, params: Mapping[str, object]) -> "Settings":
        """The settings of `adapter_params`. Raises ConfigError, naming every key that is wrong."""
        return cls(**read_settings(cls, params, _OWN, where="l2-adapter adapter_params: "))
