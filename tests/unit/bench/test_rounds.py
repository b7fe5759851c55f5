"""Rounds of measured calls: the first is not counted, and a ratio is to the floor of the same round."""

from collections.abc import Callable

from kvpool_tools.bench.measure import Bars, Rounds


def test_a_row_has_medians_of_its_rounds_and_ratios_to_the_floor_of_each() -> None:
    floors, calls = iter([[9.0], [1e-6, 1e-6], [2e-6]]), iter([[9.0], [3e-6, 5e-6], [8e-6]])
    clock, steps = iter([0.0, 100.0, 0.0, 8e-6, 0.0, 6e-6]), list[int]()
    taken = Rounds(3, steps.append)
    measured: dict[str, tuple[Callable[[], list[float]], Callable[[], float] | None]] = {
        "floor": (lambda: next(floors), None),
        "call": (lambda: next(calls), lambda: next(clock)),
    }
    taken.run(measured)
    row = taken.row("call", "floor", Bars(us=7, times_floor=3.5))
    assert steps == [3, 3, 3]
    assert (row["p50_us"], row["samples"], row["bar_us"]) == (5.0, 3, 7)
    assert (row["times_floor"], row["times_floor_spread"], row["times_floor_bar"]) == (4.0, [4.0, 4.0], 3.5)
    assert (row["daemon_cpu_us"], row["daemon_cpu_spread_us"]) == (5.0, [4.2, 5.8])
    floor = taken.row("floor", "floor")
    assert (floor["times_floor"], floor["daemon_cpu_us"], floor["bar_us"]) == (1.0, 0.0, None)
