"""NVIDIA Dynamo's standalone indexer (`python -m dynamo.indexer`) as a reader of kvpoold's events.

What it is: the program as its package installs it, in an environment of its own, asked over HTTP as its documentation says
(docs.nvidia.com/dynamo, "Standalone KV Indexer"). What it is not: Dynamo's router, which decides by what this index finds.
"""

import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.rigs.daemon import Daemon, wait_until

# The Python of an environment that has it.
PYTHON = os.environ.get("KVPOOL_ROUTERS", "")
ANSWER_TIMEOUT_S = 30.0


class DynamoIndexer:
    """One process. `register` names a daemon's endpoints, `overlap` is the number of a prompt's tokens that it finds there."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._log = directory / "dynamo.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [PYTHON, "-m", "dynamo.indexer", "--port", str(port), "--threads", "2"],
                stdout=log,
                stderr=log,
                env={**os.environ, "DYN_LOG": "info"},
            )
        wait_until(self._answers, "Dynamo's indexer answers")

    def __enter__(self) -> "DynamoIndexer":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def log(self) -> str:
        """Its output so far."""
        return self._log.read_text(errors="replace")

    def register(self, daemon: Daemon, block_tokens: int, model: str = "test-model", *, worker: int = 1) -> None:
        """Have it follow a daemon's events of a model as those of a worker; of all models where it has no endpoint."""
        info = daemon.info()
        of_all = [info["events"], info["events_replay"]]
        endpoint, replay = info.get("events_of_models", {}).get(model, of_all)
        named = {"instance_id": worker, "endpoint": endpoint, "replay_endpoint": replay}
        self._ask("/register", {**named, "model_name": model, "block_size": block_tokens})

    def overlap(
        self,
        tokens: Sequence[int],
        model: str = "test-model",
        adapter: str = "",
        salt_tag: bytes = b"",
        *,
        worker: int = 1,
    ) -> int:
        """Tokens of the prompt's beginning that a worker has, in all its media."""
        scope = {"lora_name": adapter or None, "cache_salt": salt_tag.hex() or None}
        asked = {"token_ids": list(map(int, tokens)), "model_name": model}
        found = self._ask("/query", {**asked, **{name: value for name, value in scope.items() if value}})
        return int(found["instances"].get(str(worker), {}).get("longest_matched", 0))

    def pause(self) -> None:
        """Stop it where it is: what is published meanwhile waits in its sockets, or is lost."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.log()
        try:
            self._ask("/workers")
        except urllib.error.URLError:
            return False
        return True

    def _ask(self, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read()!r}") from error
