"""A handle of the tests for one vLLM engine: a process of its own (see `driver`), asked over pipes.

Every answer has a deadline; an engine that died or is late fails the test with the end of its log.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from tests.engines.vllm.rigs.tiny_models import HYBRIDS, Geometry

START_TIMEOUT_S = 240.0
ANSWER_TIMEOUT_S = 180.0
BLOCK_TOKENS = 32
CHUNK_TOKENS = 64
# Tens of times the change that bfloat16 makes in a log probability of these models.
CLEAR_GAP = 0.3
ROOT = Path(__file__).parents[4]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines on one machine must not all sit on its first core
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "PYTHONUNBUFFERED": "1",
}


def cache_of(log: Path) -> str:
    """The cache directory of an engine with such a log. All engines of a run share it: vLLM keeps what it found out about a
    model's class there, for which it starts a process that imports all of itself, at half the cost of an engine's start."""
    return str(log.parent.parent / "vllm-cache")


class Engine:
    """One running engine. `socket` names the daemon's socket; without it the engine has no connector, or the one of `transfer`.

    `settings` are the connector's (`{"kvpool.load": "sync"}`), other keywords are vLLM's. `siblings`: connectors of a
    MultiConnector in their order, None for kvpool's own, which vLLM then finds by its name alone. `transfer`: more of vLLM's
    `kv_transfer_config`, or all of it (see `tiering`).
    `takes_every_hit`: nothing is declined for being slower than computing (in one process only).
    """

    def __init__(
        self,
        model: Path,
        geometry: Geometry,
        log: Path,
        *,
        socket: str | None = None,
        settings: dict[str, object] | None = None,
        siblings: list[dict[str, object] | None] | None = None,
        transfer: dict[str, object] | None = None,
        in_process: bool = True,
        takes_every_hit: bool = True,
        **engine: object,
    ) -> None:
        self._log = log
        options = {
            "model": str(model),
            "engine": {
                "dtype": geometry.dtype,
                "block_size": BLOCK_TOKENS,
                "max_model_len": 2048,
                "num_gpu_blocks_override": 256
                if geometry.architecture not in HYBRIDS
                else 1024,  # a table for each group
                "seed": 0,
                **engine,
            },
            "takes_every_hit": socket is not None and takes_every_hit,
            "transfer": transfer if socket is None else _transfer(socket, settings or {}, siblings) | (transfer or {}),
        }
        self._region = f"/dev/shm/vllm_offload_{(transfer or {}).get('engine_id')}.mmap"
        paths = [str(ROOT), str(ROOT / "client"), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "VLLM_CACHE_ROOT": cache_of(log),
            "VLLM_CONFIG_ROOT": str(log.parent / "vllm-config"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        }
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engines.vllm.rigs.driver", json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
        self._unread = b""
        try:
            self._answer(START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, do: str, **arguments: object) -> dict[str, Any]:
        """One command and its answer."""
        self.send(do, **arguments)
        return self.answer()

    def send(self, do: str, **arguments: object) -> None:
        """A command alone; `answer` waits for its end."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The answer to a command that was sent."""
        return self._answer(ANSWER_TIMEOUT_S)

    def tokens(self, prompts: list[list[int]], count: int, salt: str | None = None) -> list[list[int]]:
        """Greedy tokens of prompts that are given at once, computed or loaded, but not from the engine's own prefix cache."""
        self.forget()
        return tokens_of_answer(self.ask("generate", prompts=prompts, tokens=count, salt=salt))

    def clear_prompts(self, candidates: list[list[int]], count: int) -> list[list[int]]:
        """Those of the prompts whose answers do not depend on the last bits of a data type."""
        self.forget()
        gaps = self.ask("generate", prompts=candidates, tokens=count, with_gaps=True)["gaps"]
        return [ids for ids, gap in zip(candidates, gaps, strict=True) if gap >= CLEAR_GAP]

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        assert self.ask("forget")["done"]

    def log(self) -> str:
        """The engine's log so far."""
        return self._log.read_text(errors="replace")

    def has_region(self) -> bool:
        """Whether the file of the rows of its tiered offloading exists."""
        return Path(self._region).exists()

    def kill(self) -> None:
        """End all of it at once (-9)."""
        _kill_group(self._process.pid)
        self._process.wait()

    def close(self) -> None:
        """End the engine and the processes that it started."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            _kill_group(self._process.pid)
            if self._process.stdout is not None:
                self._process.stdout.close()
            Path(self._region).unlink(missing_ok=True)  # vLLM leaves it behind where it was killed

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            what = "ended" if ready else f"has not answered within {timeout_s} s"
            assert part, f"the engine {what}:\n{self.log()[-6000:]}"
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        assert "error" not in answer, f"{answer['error']}\n{self.log()[-3000:]}"
        return answer


def tokens_of_answer(answer: dict[str, Any]) -> list[list[int]]:
    """The tokens of a `generate` in which every request has come to its end."""
    assert set(answer["reasons"]) == {"length"}, answer["reasons"]
    tokens: list[list[int]] = answer["tokens"]
    return tokens


def tiering(*tiers: dict[str, object], region_bytes: int = 64 << 20, **more: object) -> dict[str, object]:
    """vLLM's tiered offloading with these secondary tiers, as an engine's `transfer`. `more` is its own extra configuration."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": f"test-{uuid.uuid4()}",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.engines.vllm.rigs.cpu_tiering",
            "cpu_bytes_to_use": region_bytes,
            "secondary_tiers": list(tiers),
            **more,
        },
    }


def _transfer(
    socket: str, settings: dict[str, object], siblings: list[dict[str, object] | None] | None
) -> dict[str, object]:
    """The vLLM options that docs/engines/vllm.md asks for."""
    policy = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    # A request is held back for a second rather than a tenth of one: a busy machine must not decide what is loaded.
    patient = {"kvpool.wait_s": 2.0, **settings}
    own: dict[str, object] = {
        "kv_connector": "KVPoolConnector",
        **policy,
        "kv_connector_extra_config": {"kvpool.socket": socket, "kvpool.chunk_tokens": CHUNK_TOKENS, **patient},
    }
    if siblings is None:
        return {**own, "kv_connector_module_path": "kvpool_client.vllm.connector"}
    children = [own if sibling is None else {**policy, **sibling} for sibling in siblings]
    return {"kv_connector": "MultiConnector", **policy, "kv_connector_extra_config": {"connectors": children}}


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return  # the process group is empty
