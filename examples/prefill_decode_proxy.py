"""A proxy before two vLLM engines, of which one computes prompts and the other one generates: on one node, or on two peers.

    python examples/prefill_decode_proxy.py http://localhost:8100 http://localhost:8200 [PORT]

Each completion goes to the first engine for one token, which leaves the prompt's KV in the pool, and then to the second, which
waits a moment for the last of it, and loads it from there. Whatever becomes of the first engine, the second one
answers: what it does not find it computes.
"""

import http.client
import json
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ONE_TOKEN = {"max_tokens": 1, "max_completion_tokens": 1, "stream": False, "stream_options": None}
PREFILL_S = 60.0


def ask(engine: str, path: str, body: bytes, timeout_s: float | None = None) -> http.client.HTTPResponse:
    """An engine's answer, of which the body is still to be read."""
    connection = http.client.HTTPConnection(engine.removeprefix("http://").rstrip("/"), timeout=timeout_s)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    return connection.getresponse()


class Proxy(BaseHTTPRequestHandler):
    """One connection of a client's."""

    def do_POST(self) -> None:
        """Have the prompt computed, then pass on what the second engine answers, as it comes."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            first = ask(sys.argv[1], self.path, json.dumps({**asked, **ONE_TOKEN}).encode(), PREFILL_S)
            first.read()
            if first.status == HTTPStatus.OK:
                asked["kv_transfer_params"] = {"load": "wait", **(asked.get("kv_transfer_params") or {})}
        except (OSError, http.client.HTTPException) as error:
            self.log_message("the first engine: %s", error)
        answer = ask(sys.argv[2], self.path, json.dumps(asked).encode())
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
        self.end_headers()
        while part := answer.read1():
            self.wfile.write(part)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[3]) if len(sys.argv) > 3 else 8000), Proxy)
    print(f"listening on port {server.server_port}", flush=True)
    server.serve_forever()
