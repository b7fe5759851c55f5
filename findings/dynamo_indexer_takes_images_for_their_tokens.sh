#!/bin/sh
# NVIDIA Dynamo's standalone indexer takes a vLLM prompt with an image (or a cache_salt) for its tokens alone, and so loses blocks.
#
#   findings/dynamo_indexer_takes_images_for_their_tokens.sh   needs python3 with its venv module; installs into a temporary folder
#                                                              (90 MB of downloads)
#
# An image stands in a prompt as a run of one placeholder token, the same for every image; vLLM names the image in its own field of
# BlockStored, `extra_keys` ([[identifier, offset]]), and a prompt's cache_salt there too. Dynamo's function for block hashes mixes
# images and salts in, /query takes a cache_salt, and a message with Dynamo's own field `block_mm_infos` is indexed under such a hash.
# `python -m dynamo.indexer` reads vLLM's field as well, but takes from it only salts that Dynamo's front end has marked. Two prompts
# that differ in the image, or in a salt of vLLM's clients, share one place in its tree, without a line at level info. Hence
#   - a prompt is not found under its own hashes, and its tokens are found whatever the image;
#   - of two such prompts the second has no place: the next turn of its chat is dropped (WARN: parent not found), and when the engine
#     evicts the first the indexer answers 0 for both, with the second's blocks in the engine all the while.
#
# Seen, CPython 3.11, ai-dynamo-runtime 1.6.1; messages as vLLM 0.32.0 encodes them; tokens found of a prompt of 32, of its next turn's 48:
#   block_mm_infos, image a: by its hashes 32 by tokens 0
#   extra_keys, image a: by its hashes 0 by tokens 32 by those of b 0
#   image b stored, and its next turn: by tokens 32
#   image a evicted, b kept: by tokens 0
#   image b evicted, a kept: by tokens 32
#   extra_keys salt: asked with the salt 0 without 32
#   extra_keys dynamo-cache-salt:salt: asked with the salt 32 without 0
# Fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check ai-dynamo-runtime==1.6.1 pyzmq==27.1.0 msgpack==1.1.2 >&2

cat >"$folder/judge.py" <<'PYTHON'
import json
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request

import msgpack
import zmq
from dynamo.llm import compute_block_hash_for_seq

BLOCK, PLACEHOLDER = 16, 151_655


def free_port():
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


web, events = free_port(), free_port()
indexer = subprocess.Popen([sys.executable, "-m", "dynamo.indexer", "--port", str(web)], stdout=2, stderr=2)
publisher = zmq.Context().socket(zmq.PUB)
publisher.bind(f"tcp://127.0.0.1:{events}")
sent = 0


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{web}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def found(answer):
    return answer["instances"].get("1", {}).get("longest_matched", 0)


def by_tokens(tokens, **more):
    return found(ask("/query", {"token_ids": tokens, "model_name": "model", **more}))


def by_hashes(tokens, image):
    """As Dynamo hashes a prompt with that image in each block."""
    info = {"mm_objects": [{"mm_hash": int(image[:16], 16), "offsets": []}]}
    hashes = compute_block_hash_for_seq(tokens, BLOCK, [info] * (len(tokens) // BLOCK))
    signed = [one - (1 << 64) if one >> 63 else one for one in hashes]
    return found(ask("/query_by_hash", {"block_hashes": signed, "model_name": "model"}))


def publish(event):
    global sent
    payload = msgpack.packb([time.time(), [event], 0])
    publisher.send_multipart([b"", struct.pack(">Q", sent), payload])
    sent += 1
    time.sleep(1)


def stored(hashes, tokens, parent=None, **more):
    event = {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": BLOCK,
        "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0, "kv_cache_spec_kind": "full_attention",
    }
    publish({**event, **more})


def removed(hashes):
    publish({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0})


def prompt(number):
    """Two blocks, an image over both; and a third, of words."""
    return [number, *[PLACEHOLDER] * (2 * BLOCK - 2), 7], list(range(100, 100 + BLOCK))


def keys(image):
    return {"extra_keys": [[[image, 1]], [[image, -BLOCK + 1]]]}


try:
    for _ in range(600):
        try:
            ask("/workers")
            break
        except urllib.error.URLError:
            time.sleep(0.1)
    endpoint = f"tcp://127.0.0.1:{events}"
    ask("/register", {"instance_id": 1, "model_name": "model", "block_size": BLOCK, "endpoint": endpoint})
    time.sleep(5)
    a, b = "a1" * 32, "b2" * 32

    tokens, _ = prompt(1)
    info = {"mm_objects": [{"mm_hash": int(a[:16], 16), "offsets": []}]}
    stored([11, 12], tokens, block_mm_infos=[info, info])
    print("block_mm_infos, image a: by its hashes", by_hashes(tokens, a), "by tokens", by_tokens(tokens))

    tokens, words = prompt(2)
    stored([21, 22], tokens, **keys(a))
    print("extra_keys, image a: by its hashes", by_hashes(tokens, a), "by tokens", by_tokens(tokens), "by those of b", by_hashes(tokens, b))
    stored([23, 24], tokens, **keys(b))
    stored([25], words, parent=24)
    print("image b stored, and its next turn: by tokens", by_tokens(tokens + words))
    removed([21, 22])
    print("image a evicted, b kept: by tokens", by_tokens(tokens))

    tokens, words = prompt(3)
    stored([31, 32], tokens, **keys(a))
    stored([33, 34], tokens, **keys(b))
    removed([33, 34])
    print("image b evicted, a kept: by tokens", by_tokens(tokens))

    for number, salt in (41, "salt"), (51, "dynamo-cache-salt:salt"):
        tokens = list(range(1000 * number, 1000 * number + 2 * BLOCK))
        stored([number, number + 1], tokens, extra_keys=[[salt], None])
        print(f"extra_keys {salt}: asked with the salt", by_tokens(tokens, cache_salt="salt"), "without", by_tokens(tokens))
finally:
    indexer.kill()
PYTHON

cat >"$folder/expected" <<'TEXT'
block_mm_infos, image a: by its hashes 32 by tokens 0
extra_keys, image a: by its hashes 0 by tokens 32 by those of b 0
image b stored, and its next turn: by tokens 32
image a evicted, b kept: by tokens 0
image b evicted, a kept: by tokens 32
extra_keys salt: asked with the salt 0 without 32
extra_keys dynamo-cache-salt:salt: asked with the salt 32 without 0
TEXT
"$folder/venv/bin/python" "$folder/judge.py" 2>"$folder/errors" | tee "$folder/seen"
if ! diff -u "$folder/expected" "$folder/seen"; then
  tail -n 20 "$folder/errors" >&2
  exit 1
fi
