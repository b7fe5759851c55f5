"""The router of the vLLM project (`vllm-router`), with its policy `kv_aware`, before engines that only say who was asked.

What it is: the program as its package installs it, in an environment of its own. It reads the events of each engine's daemon,
and sends a prompt of token ids where most of it is. What it is not: engines.
"""

import json
import os
import re
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.rigs.daemon import Daemon, wait_until
from tests.rigs.runs.ports import free_port

# The Python of an environment that has it.
PYTHON = os.environ.get("KVPOOL_ROUTERS", "")
ANSWER_TIMEOUT_S = 30.0
MODEL = "test-model"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Engine:
    """An engine's HTTP server: it answers each completion with its own name."""

    def __init__(self, name: str) -> None:
        self.url = ""
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                """Nothing."""

            def do_GET(self) -> None:
                self._answer({"data": [{"id": MODEL, "object": "model"}]})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self._answer({"id": "1", "object": "text_completion", "model": MODEL, "choices": [engine.choice]})

            def _answer(self, body: object) -> None:
                data = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.choice = {"index": 0, "text": name, "finish_reason": "stop"}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()


class VllmRouter:
    """One process. `daemons`: by the name of the engine whose pool it is."""

    def __init__(self, directory: Path, daemons: Mapping[str, Daemon], block_tokens: int) -> None:
        self._engines = {name: Engine(name) for name in daemons}
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._log = directory / "vllm-router.log"
        arguments = [f"--port={port}", f"--prometheus-port={free_port()}", "--host=127.0.0.1", "--policy=kv_aware"]
        # A block in this pool's memory is worth as much as one in the engine's: so it says how much of a prompt it has found.
        arguments += ["--kv-penalty-host=1.0", f"--kv-event-block-size={block_tokens}", f"--kv-event-model={MODEL}"]
        for name, daemon in daemons.items():
            info, url = daemon.info(), self._engines[name].url
            arguments += [f"--kv-event-source={url}={info['events']}"]
            arguments += [f"--kv-event-replay-source={url}={info['events_replay']}"]
        urls = [engine.url for engine in self._engines.values()]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(Path(PYTHON).parent / "vllm-router"), "--log-level=debug", "--worker-urls", *urls, *arguments],
                stdout=log,
                stderr=log,
            )
        wait_until(self._answers, "the router answers")

    def __enter__(self) -> "VllmRouter":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for engine in self._engines.values():
            engine.close()

    def log(self) -> str:
        """Its output so far."""
        return self._log.read_text(errors="replace")

    def chosen(self, tokens: Sequence[int]) -> tuple[str, int]:
        """The engine that a prompt is sent to, and how many of its tokens were found there."""
        before = self._log.stat().st_size
        answer = self._ask("/v1/completions", {"model": MODEL, "prompt": list(map(int, tokens)), "max_tokens": 1})
        found: list[str] = []

        def is_logged() -> bool:
            with self._log.open(errors="replace") as log:
                log.seek(before)
                found[:] = re.findall(r"credited_prefix_tokens=(\d+)", COLOURS.sub("", log.read()))
            return bool(found)

        wait_until(is_logged, "the router logs its decision")
        return str(answer["choices"][0]["text"]), int(found[-1])

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.log()
        try:
            self._ask("/health")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def _ask(self, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
            text = answer.read()
        return json.loads(text) if body is not None else None
