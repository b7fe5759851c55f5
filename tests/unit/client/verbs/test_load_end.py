"""The end of a load, which several threads may notice at once: it is reported once."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace
from typing import Any

import kvpool_client as kv
from kvpool.states import LoadReason
from kvpool_client.verbs.load import BegunLoad, Load, LoadedRun
from tests.rigs.daemon import wait_until


class EndedRun:
    """A run that has ended, and says how only when the test lets it."""

    def __init__(self) -> None:
        self.may_answer = Event()
        self.asked = 0

    def wait(self, timeout_s: float) -> bool:
        return True

    def done(self) -> bool:
        return True

    def progress(self) -> int:
        return 0

    def reason(self) -> int:
        return LoadReason.COMPLETE

    def chunks(self) -> int:
        self.asked += 1
        assert self.may_answer.wait(180.0)
        return 3


def test_a_load_that_several_threads_wait_for_ends_once() -> None:
    run, ended = EndedRun(), []
    loaded: Any = LoadedRun(range(3), 1, 1, run, LoadReason.COMPLETE)  # type: ignore[arg-type]  # it needs no layers
    begun = BegunLoad(
        SimpleNamespace(),  # type: ignore[arg-type]  # it asks no lease
        (loaded,),
        first_chunk=0,
        chunks=3,
        chunk_tokens=16,
        has_groups=False,
        has_windows=False,
        timeout_s=60.0,
        on_end=lambda _, result: ended.append(result),
    )
    load = Load(begun)
    with ThreadPoolExecutor(2) as threads:
        results = [threads.submit(load.wait) for _ in range(2)]
        wait_until(lambda: run.asked > 0, "one of them has come so far")
        run.may_answer.set()
        assert [result.result(180.0) for result in results] == [kv.LoadResult(3, 48, "complete")] * 2
    assert ended == [kv.LoadResult(3, 48, "complete")]
    assert run.asked == 1
