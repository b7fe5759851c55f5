"""Pauses between a Pool's attempts to connect: short where no daemon is, longer and longer where one refuses."""

import pytest

from kvpool.errors import DaemonUnreachable, InvalidArgument, KVPoolError, Refused
from kvpool_client import connect
from kvpool_client.connection import link as module
from kvpool_client.connection.counters import Counters
from kvpool_client.connection.link import REFUSED_RETRY_S_MAX, RETRY_S, Link
from kvpool_client.connection.session import SessionPlan
from tests.rigs.daemon import SMALL, wait_until


class Answers:
    """The results of the attempts in order, the last one repeated; and the pauses before them."""

    def __init__(self, *errors: KVPoolError) -> None:
        self._errors = list(errors)
        self.tries = 0
        self.pauses: list[float] = []

    def refuse(self, *_: object, **__: object) -> None:
        """In the place of a session."""
        self.tries += 1
        raise self._errors.pop(0) if len(self._errors) > 1 else self._errors[0]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Refusals with two other results between, and no real waiting."""
    busy, away = Refused("busy", "full"), DaemonUnreachable("away")
    answers = Answers(*[busy] * 10, away, busy, busy, Refused("stopping", "it stops"), busy)

    def wait(_link: Link, _session: object, timeout_s: float) -> bool:
        answers.pauses.append(timeout_s)
        return False

    monkeypatch.setattr(module, "Session", answers.refuse)
    monkeypatch.setattr(Link, "_wait", wait)
    return answers


def test_a_refused_client_backs_off_and_one_without_a_daemon_retries_soon(answers: Answers) -> None:
    link = Link(SessionPlan("/nowhere", "m", SMALL, 1.0), Counters())
    try:
        wait_until(lambda: answers.tries > 20, "it has tried often")
    finally:
        link.close()
    doubled = [min(RETRY_S * 2**power, REFUSED_RETRY_S_MAX) for power in range(1, 11)]
    assert answers.pauses[:16] == [*doubled, RETRY_S, 0.2, 0.4, RETRY_S, 0.2, 0.4]
    assert max(answers.pauses) == REFUSED_RETRY_S_MAX == 5.0


@pytest.mark.parametrize("path", ["unix:///run/kvpool/kvpool.sock", "", "a" * 108, "a\0b", b"/run/kvpool.sock", 0])
def test_what_is_no_path_of_a_socket_is_refused_by_name(path: object) -> None:
    with pytest.raises(InvalidArgument, match=r"path is .*, expected a path"):
        connect(path, model="m", layout=SMALL)  # type: ignore[arg-type]
