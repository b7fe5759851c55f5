"""Renewals of the leases of running loads: none for a load that ends soon, one at once for a lease that has waited."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool.clock import NS_PER_S
from kvpool.protocol.records import messages as m
from kvpool_client.connection.session import Session
from tests.rigs.daemon import Daemon, wait_connected, wait_until
from tests.rigs.prompts import begin_load, load, prompt, store

Start = Callable[..., Daemon]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The kind of each request of any thread."""
    kinds: list[type] = []
    call = Session.call

    def call_and_note(session: Session, request: object, *rest: Any) -> Any:
        kinds.append(type(request))
        return call(session, request, *rest)

    monkeypatch.setattr(Session, "call", call_and_note)
    return kinds


def test_a_load_that_ends_soon_costs_no_request(start_daemon: Start, asked: list[type]) -> None:
    with start_daemon(server__lease_ttl="10m").connect() as pool:
        keys = prompt(pool, 1)
        store(pool, keys)
        for _ in range(3):
            with pool.acquire(pool.lookup(keys)) as lease:
                assert load(pool, lease)[0].reason == "complete"
    assert asked.count(m.Acquire) == 3
    assert m.Renew not in asked


def test_a_lease_that_has_waited_is_renewed_when_its_load_begins(start_daemon: Start, asked: list[type]) -> None:
    with start_daemon(server__lease_ttl="10m").connect() as pool:
        keys = prompt(pool, 1)
        store(pool, keys)
        with pool.acquire(pool.lookup(keys)) as waited, pool.acquire(pool.lookup(keys)) as young:
            begun, _ = begin_load(pool, young)
            waited.hold.asked_ns -= 600 * NS_PER_S  # as if its time had come
            assert m.Renew not in asked
            late, _ = begin_load(pool, waited)
            wait_until(lambda: m.Renew in asked, "both leases are renewed")
            assert begun.wait().reason == late.wait().reason == "complete"


@pytest.mark.parametrize("verb", ["acquire", "acquire_set", "claim"])
def test_a_lease_whose_answer_comes_late_is_renewed_when_its_load_begins(
    start_daemon: Start, asked: list[type], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    for module in ("connection.link", "verbs.lease"):
        monkeypatch.setattr(f"kvpool_client.{module}.RENEW_FRACTION", 1 / 600)
    with start_daemon(server__lease_ttl="10m").connect() as pool:
        keys = prompt(pool, 1)
        store(pool, keys)
        names, row = np.ones((1, 32), np.uint8), np.zeros((1, pool.layout.chunk_bytes), np.uint8)
        assert pool.save_set(names, row).commit().stored == 1
        hit, call = pool.lookup(keys), Session.call
        with pool.acquire(hit) as issued:
            ticket = issued.ticket()

            def call_late(session: Session, *given: Any) -> Any:
                answer = call(session, *given)
                time.sleep(1.1)  # until the lease is to be renewed
                return answer

            with monkeypatch.context() as late:
                late.setattr(Session, "call", call_late)
                if verb == "claim":
                    lease = pool.claim(ticket)
                else:
                    lease = pool.acquire(hit) if verb == "acquire" else pool.acquire_set(names)
            with lease:
                assert lease.hold.renewal.has_passed()
                is_set = verb == "acquire_set"
                begun = pool.load_set(lease, row.copy()) if is_set else begin_load(pool, lease)[0]
                wait_until(lambda: m.Renew in asked, "it is renewed", 30.0)
                assert begun.wait().reason == "complete"


def test_the_end_of_a_load_from_another_life_does_not_end_the_renewals_of_a_lease_with_its_number(
    start_daemon: Start, asked: list[type]
) -> None:
    daemon = start_daemon(server__lease_ttl="3s")
    with daemon.connect() as pool:
        keys = prompt(pool, 1)
        store(pool, keys)
        with pool.acquire(pool.lookup(keys)) as before:
            old, _ = begin_load(pool, before)
            daemon.kill()
            daemon.start()
            wait_connected(pool)
            store(pool, keys)
            with pool.acquire(pool.lookup(keys)) as lease:
                assert lease.hold.id == before.hold.id
                asked.clear()
                begun, _ = begin_load(pool, lease)
                old.wait()
                wait_until(lambda: m.Renew in asked, "the lease is renewed", 30.0)
                assert begun.wait().reason == "complete"
