"""Faults in one direction of the SSD tier's I/O."""

from kvpool.tiers.ssd.faults import IoFaults

S = 1_000_000_000


def test_so_many_faults_in_a_row_suspend_a_direction_and_are_counted_with_their_time() -> None:
    faults = IoFaults(8)
    for number in range(7):
        faults.note_fault(f"fault {number}", (10 + number) * S)
        assert not faults.is_suspended
    faults.note_fault("the last", 25 * S)
    assert faults.is_suspended
    assert faults.describe() == "the last, 8 errors in 15 s"


def test_a_success_in_between_begins_the_row_again() -> None:
    faults = IoFaults(2)
    for _ in range(5):
        faults.note_fault("a fault", S)
        assert faults.describe() == "a fault"
        faults.note_success()
        assert (faults.is_suspended, faults.describe()) == (False, "")


def test_after_a_probe_nothing_is_shown_and_a_single_fault_suspends_until_one_succeeds() -> None:
    faults = IoFaults(3)
    for _ in range(3):
        faults.note_fault("a fault", S)
    faults.resume()
    assert (faults.is_suspended, faults.describe()) == (False, "")
    faults.note_fault("again", 2 * S)
    assert faults.is_suspended
    faults.resume()
    faults.note_success()
    faults.note_fault("later", 3 * S)
    assert not faults.is_suspended


def test_a_direction_that_was_not_suspended_gains_nothing_by_a_probe() -> None:
    faults = IoFaults(3)
    faults.note_fault("a fault", S)
    faults.resume()
    for _ in range(2):
        faults.note_fault("a fault", S)
        assert not faults.is_suspended
