"""Settings of LMCache's plug-in: the content of `adapter_params` in `--l2-adapter`.

Read once, checked whole; every fault is named at once. Pure; any thread.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool.errors import InvalidArgument, did_you_mean
from kvpool.socket_path import fault_of_path, find_socket
from kvpool.states import PRIORITY_MAX
from kvpool_client.arguments import is_text

# LMCache frees a load's objects after 300 s and a store's after 600 s (its L1's locks, by default), and may give their bytes to
# others. A task ends long before that, with the last requests and a copy behind its deadline.
TASK_TIMEOUT_MAX_S = 120.0
_NUMBERS: dict[str, tuple[float, float]] = {
    "timeout_s": (0.001, 3600.0),
    "task_timeout_s": (0.001, TASK_TIMEOUT_MAX_S),
    "lock_timeout_s": (0.001, 3600.0),
    "copy_threads": (1, 64),
    "priority": (0, PRIORITY_MAX),
}
_WHOLE = ("copy_threads", "priority")
_TEXTS = ("revision", "salt")


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
        """The settings of `adapter_params`. Raises InvalidArgument, naming every key that is wrong."""
        given = dict(params)
        known = ["socket", *_TEXTS, *_NUMBERS]
        faults = [f"{key} is no setting{did_you_mean(str(key), known)}" for key in given if key not in known]
        faults += [
            f"{key} is {given[key]!r}, expected a string" for key in _TEXTS if key in given and not is_text(given[key])
        ]
        if "socket" in given and (fault := fault_of_path(given["socket"])):
            faults.append(f"socket is {given['socket']!r}, expected {fault}")
        elif "socket" in given and not os.path.isabs(given["socket"]):  # type: ignore[arg-type]  # a path by the check above
            faults.append(f"socket is {given['socket']!r}, expected an absolute path")
        if is_text(revision := given.get("revision", "")) and revision and not str(revision).strip():
            faults.append(f"revision is {revision!r}, expected a name, or none")
        for key, (least, most) in _NUMBERS.items():
            value = given.get(key, least)
            is_number = isinstance(value, int if key in _WHOLE else (int, float)) and not isinstance(value, bool)
            if not is_number or not least <= value <= most:  # type: ignore[operator]  # a number by the line above
                faults.append(f"{key} is {value!r}, expected {least}..{most}")
        if not faults:
            trip_s, task_s = (
                given.get(key, fallback) for key, fallback in (("timeout_s", 1.0), ("task_timeout_s", 10.0))
            )
            if trip_s > task_s:  # type: ignore[operator]  # numbers by the check above
                faults.append(f"timeout_s is {trip_s!r}, expected no more than task_timeout_s, {task_s!r}")
        if faults:
            raise InvalidArgument("l2-adapter adapter_params: " + "; ".join(faults))
        if "socket" in given:
            given["socket"] = os.fsdecode(given["socket"])  # type: ignore[arg-type]  # a path by the check above
        return cls(**given)  # type: ignore[arg-type]  # each was checked above
