"""Region of host memory, requests and jobs, as vLLM hands them to a tier. Bytes derive from keys."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool_client.vllm.tier.identity import Engine
from kvpool_client.vllm.tier.settings import Settings
from kvpool_client.vllm.tier.tier_jobs import Finished, TierJobs
from tests.engines.conftest import TIMEOUT_S
from tests.rigs.daemon import Daemon, wait_until

ROW_BYTES = 1 << 16
TOKENS = 16


def key_of(prompt: int, chunk: int, group: int = 0) -> bytes:
    """vLLM's key of a prompt's chunk."""
    return hashlib.sha256(f"{prompt} {chunk}".encode()).digest() + group.to_bytes(4, "big")


def keys_of(prompt: int, chunks: int) -> list[bytes]:
    """Those of a prompt."""
    return [key_of(prompt, chunk) for chunk in range(chunks)]


def bytes_of(key: bytes) -> npt.NDArray[np.uint8]:
    """What the row of a key has."""
    return np.random.default_rng(list(key)).integers(0, 256, ROW_BYTES, np.uint8)


def spec_of(model: str = "/models/tiny", *, ranks: int = 1, **facts: Any) -> Any:
    """vLLM's facts of an engine."""
    given = {
        "groups": (SimpleNamespace(group_id=0, tokens_per_block=TOKENS, layer_names=("layers.0", "layers.1")),),
        "worker_kv_bytes_per_block": ROW_BYTES // ranks,
        "model": SimpleNamespace(name=model, dtype="bfloat16"),
        "cache": SimpleNamespace(tokens_per_hash=TOKENS, blocks_per_chunk=1),
        "parallel": SimpleNamespace(
            world_size=ranks, tp_size=ranks, pp_size=1, pcp_size=1, dcp_size=1, is_parallelism_agnostic=False
        ),
        "kv_cache_layout": "LBHNC",
    }
    return SimpleNamespace(config=SimpleNamespace(**{**given, **facts}))


class Context:
    """A request's context, as vLLM's ReqContext."""

    def __init__(self, keys: Sequence[bytes] = (), *, params: Any = None, hints: Any = None) -> None:
        self.kv_transfer_params = params
        self.kv_hints = hints
        self._states: dict[type, Any] = {}
        self._ends = {key: (number + 1) * TOKENS for number, key in enumerate(keys)}

    def set_state(self, value: Any) -> None:
        self._states[type(value)] = value

    def get_state(self, kind: type) -> Any:
        return self._states.get(kind)

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self._ends.get(key)


class Region:
    """A region of rows, the tier's jobs on it, and a script that is vLLM's manager."""

    def __init__(
        self, daemon: Daemon, *, rows: int = 64, spec: Any = None, engine: Engine | None = None, **settings: object
    ) -> None:
        given: dict[str, object] = {"socket": daemon.socket, "revision": "1"}
        given |= {"timeout_s": TIMEOUT_S, "batch_timeout_s": TIMEOUT_S, **settings}
        self.rows: Any = np.zeros((rows, ROW_BYTES), np.uint8)
        self.jobs = TierJobs(Settings.of(given), spec or spec_of(), self.rows.data, engine or Engine())
        self.ended: dict[int, Finished] = {}
        self._numbers = 0

    def begin(self, keys: Sequence[bytes] = (), **given: Any) -> Context:
        """A request arrives."""
        context = Context(keys, **given)
        self.jobs.begin_request(context)
        return context

    def found(self, context: Context, keys: Iterable[bytes]) -> list[bool]:
        """Which keys are hits."""
        return [self.jobs.has(key, context) for key in keys]

    def submit(
        self, context: Context, keys: Sequence[bytes], rows: Sequence[int] | None = None, *, is_load: bool
    ) -> int:
        """A job of vLLM's; its number. Rows to store are filled, others cleared."""
        self._numbers += 1
        chosen = list(range(len(keys))) if rows is None else list(rows)
        for key, row in zip(keys, chosen, strict=True):
            self.rows[row] = 0 if is_load else bytes_of(key)
        job = SimpleNamespace(
            job_id=self._numbers, keys=keys, chunk_ids=np.array(chosen, np.int32), req_context=context
        )
        (self.jobs.submit_load if is_load else self.jobs.submit_store)(job)
        return self._numbers

    def poll(self) -> None:
        """Take what has ended, each job once."""
        for one in self.jobs.take_finished():
            assert one.job_id is not None
            assert one.job_id not in self.ended
            self.ended[one.job_id] = one

    def wait(self, number: int) -> Finished:
        """A job's end."""

        def has_ended() -> bool:
            self.poll()
            return number in self.ended

        wait_until(has_ended, f"job {number} has ended")
        return self.ended[number]

    def store(self, keys: Sequence[bytes], context: Context | None = None) -> Finished:
        """A request has these computed and stored."""
        return self.wait(self.submit(context or self.begin(keys), keys, is_load=False))

    def load(self, keys: Sequence[bytes], context: Context | None = None) -> Finished:
        """A request has these loaded; every row that counts as loaded has its own bytes."""
        chosen = list(reversed(range(len(keys))))
        ended = self.wait(self.submit(context or self.begin(keys), keys, chosen, is_load=True))
        for key, row in zip(keys, chosen, strict=True):
            if key in ended.good:
                assert np.array_equal(self.rows[row], bytes_of(key))
        return ended

    def end(self, context: Context) -> None:
        """A request ends; what follows of it has ended when this returns."""
        self.jobs.end_request(context)
        self.settle()

    def settle(self) -> None:
        """All that was submitted has ended."""
        wait_until(lambda: "0/" in repr(self.jobs) and repr(self.jobs).count(" 0/") == 2, "no job is open")
        self.poll()

    def counts(self) -> dict[str, int | float]:
        """What was counted since the last call."""
        self.poll()
        return self.jobs.take_counts() or {}


Start = Callable[..., Region]
