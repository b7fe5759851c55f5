"""Flush of one model's chunks for an engine whose cache was reset: as an operator would do it, on a connection of its own.

A chunk that is held stays: by a load of any engine, or by a lease that has been released and whose release the daemon has not
read yet, since it came on another connection. So it is asked again until nothing is left. Any thread.
"""

import threading

from kvpool.clock import Deadline
from kvpool.errors import KVPoolError
from kvpool.protocol.blocking import BlockingConnection

# Between two orders; loads and releases end within milliseconds (guess).
PAUSE_S = 0.05


def flush_model(socket: str, model: str, timeout_s: float, *, is_bounded: bool = False) -> str:
    """Drop every chunk of the model, of all its shards, salts and adapters. Empty, or why that could not be done within
    `timeout_s`, beyond which it waits for the answer to an order alone: not even for that where it `is_bounded`."""
    deadline, pause = Deadline(timeout_s), threading.Event()
    try:
        with BlockingConnection.admin(socket, timeout_s) as connection:
            while held := connection.flush(model, None, timeout_s=deadline.remaining_s() if is_bounded else None)[
                "skipped"
            ]:
                if deadline.has_passed():
                    return f"{held} chunks were held by loads or saves for {timeout_s:g} s"
                pause.wait(PAUSE_S)
    except (KVPoolError, OSError) as error:
        return str(error)
    return ""
