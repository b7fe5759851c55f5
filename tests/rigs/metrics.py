"""Metrics of a daemon as a scraper has them."""

import urllib.error
import urllib.request

from tests.rigs.daemon import Daemon, wait_until

# Options of a daemon that has them, and whose own probe does not count among its work.
METERED = {"server__metrics": "127.0.0.1:0", "server__probe_interval": "0s"}


def get(address: str, path: str = "/metrics") -> tuple[int, str]:
    """Status and body of an answer over HTTP."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=60.0) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def samples_of(daemon: Daemon) -> dict[str, float]:
    """All samples, by name and labels."""
    status, text = get(daemon.info()["metrics"])
    assert status == 200, text
    samples = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def wait_sample(daemon: Daemon, name: str, value: float) -> dict[str, float]:
    """All samples, once one of them has a value."""
    wait_until(lambda: samples_of(daemon).get(name) == value, f"{name} is {value}")
    return samples_of(daemon)
