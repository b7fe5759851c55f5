#!/bin/bash
# vllm-router (0.1.17), policy kv_aware with --kv-event-source: events that vLLM publishes under any topic but the empty one are
# thrown away, without a line in its log at level debug and without a counter. Its subscription is to all topics, so that the messages
# arrive, and the router has no option for a topic. "kv-events" is what the example subscribers of vLLM and SGLang subscribe to: behind
# engines configured for them the router routes as if nothing were cached anywhere.
#
# Seen: the same batch of BlockStored, as vLLM's ZMQ publisher encodes it, published under "" gives every prompt to the worker that has
# it, credited_prefix_tokens=153 of 192 (0.8, the credit of host memory); published under "kv-events" all prompts go to one worker,
# credited_prefix_tokens=0.
#
# Installs pinned packages into a temporary folder; fails if the behaviour changes.
set -eu
directory=$(mktemp -d)
trap 'pkill -P $$ 2>/dev/null || true; rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check vllm-router==0.1.17 pyzmq==27.1.0 msgpack==1.1.2
cat > "$directory/run.py" <<'PYTHON'
import json, os, re, signal, socket, struct, subprocess, sys, threading, time, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgpack, zmq

BLOCK, BLOCKS, PROMPTS = 32, 6, 6


def free_port():
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


def worker(name):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def answer(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            choice = {"index": 0, "text": name, "finish_reason": "stop"}
            data = json.dumps({"id": "1", "object": "text_completion", "model": "m", "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = answer

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def credits(topic):
    """Where each prompt went, and the credited tokens, with events under a topic. Prompt i is on worker i % 2."""
    context, urls = zmq.Context(), [worker("0"), worker("1")]
    sockets, ports, port = [context.socket(zmq.PUB) for _ in urls], [free_port() for _ in urls], free_port()
    for made, at in zip(sockets, ports):
        made.bind(f"tcp://127.0.0.1:{at}")
    sources = [f"--kv-event-source={url}=tcp://127.0.0.1:{at}" for url, at in zip(urls, ports)]
    log = open(os.path.join(sys.argv[1], "router.log"), "w+")
    router = subprocess.Popen(
        [os.path.join(os.path.dirname(sys.executable), "vllm-router"), "--log-level=debug", "--worker-urls", *urls]
        + ["--policy=kv_aware", "--host=127.0.0.1", f"--port={port}", f"--prometheus-port={free_port()}"]
        + [f"--kv-event-block-size={BLOCK}", "--kv-event-model=m", *sources],
        stdout=log, stderr=log, start_new_session=True,
    )
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.2)
        time.sleep(3)
        prompts = [[1 + (i * 7919 + j * 31) % 30_000 for j in range(BLOCK * BLOCKS)] for i in range(PROMPTS)]
        for number, tokens in enumerate(prompts):
            event = {
                "type": "BlockStored", "block_hashes": [1000 * number + at for at in range(1, BLOCKS + 1)],
                "parent_block_hash": None, "token_ids": tokens, "block_size": BLOCK, "lora_id": None, "medium": "CPU",
                "lora_name": None,
            }
            payload = msgpack.packb([time.time(), [event], 0])
            sockets[number % 2].send_multipart([topic, struct.pack(">Q", number // 2), payload])
        time.sleep(3)
        went = []
        for tokens in prompts:
            body = json.dumps({"model": "m", "prompt": [*tokens, 1], "max_tokens": 1}).encode()
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})
            went.append(json.load(urllib.request.urlopen(request, timeout=30))["choices"][0]["text"])
        time.sleep(1)
        log.seek(0)
        text = re.sub(r"\x1b\[[0-9;]*m", "", log.read())
        shown = [line for line in text.splitlines() if "kv_index" in line and ("decode" in line or "topic" in line)]
        return went, sorted({int(one) for one in re.findall(r"credited_prefix_tokens=(\d+)", text)}), shown
    finally:
        os.killpg(router.pid, signal.SIGKILL)


under_empty, under_named = credits(b""), credits(b"kv-events")
print("topic '':         ", *under_empty)
print("topic 'kv-events':", *under_named)
assert under_empty[0] == ["0", "1"] * 3 and under_empty[1] == [153], "events under the empty topic count"
assert len(set(under_named[0])) == 1 and under_named[1] == [0] and not under_named[2], "under another one they vanish in silence"
print("as stated")
PYTHON
"$directory/venv/bin/python" "$directory/run.py" "$directory"
