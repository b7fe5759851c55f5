#!/bin/sh
# InfiniStore answers a lookup with blocks that it has evicted itself, and evicts a block that is written twice as if it never had been.
#
#   findings/infinistore_promises_evicted_blocks.sh   needs python3 with its venv module, and a C compiler; installs into a temporary
#                                                     folder (30 MB of downloads), and needs 1 GB of memory
#
# get_match_last_index(keys) is the call for the longest prefix of a prompt: keys in order, the answer is the last index that matches.
# It looks by halving, which holds only while no block is gone before one that is there. But the store evicts what was written or read
# longest ago, and a prompt is written from its front: once it is full the front of a prompt goes first. Then the answer is all of the
# prompt, where nothing of it can be used: the engine waits for blocks that are not there instead of computing.
# A key that is there already is stored a second time, and the queue of eviction keeps the first copy as well: two engines that save the
# same prefix. The first copy holds its memory, and when its turn comes the key goes, with the second copy, however young.
#
# Seen, CPython 3.11, infinistore 0.2.35, its server with 1 GiB and its client over TCP, values of 4 MiB (256 fit; it evicts from 95 % to 80 %):
#   prompt of 128 blocks, then 117 others: get_match_last_index 127, blocks there 40 to 127
#   written, 100 others, written again, 143 others: there False, of the 100 written before it there 61, of the 143 there 143
#   one key written 244 times: the only other key there False
# Fails when that changes.
#
# The server does not start without an RDMA device, also to serve TCP alone: it is given a libibverbs that has one and does nothing.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip="$folder/venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps"
$pip infinistore==0.2.35 uvloop==0.21.0 numpy==2.2.6 >&2

cat >"$folder/verbs.c" <<'C'
#include <stddef.h>

static char device[4096], context[4096], domain[64], region[256];
static void *list[2] = {device, NULL};

void **ibv_get_device_list(int *number) { *number = 1; return list; }
const char *ibv_get_device_name(void *of) { (void)of; return "none"; }
void *ibv_open_device(void *of) { (void)of; return context; }
int ibv_query_port(void *of, unsigned char port, char *attributes) { (void)of; (void)port; attributes[46] = 1; return 0; }  /* IB */
void *ibv_alloc_pd(void *of) { (void)of; return domain; }
void *ibv_reg_mr(void *in, void *start, size_t length, int access) { (void)in; (void)start; (void)length; (void)access; return region; }

#define UNUSED(name) void *name(void) { return NULL; }
UNUSED(ibv_ack_cq_events) UNUSED(ibv_close_device) UNUSED(ibv_create_comp_channel) UNUSED(ibv_create_cq) UNUSED(ibv_create_qp)
UNUSED(ibv_dealloc_pd) UNUSED(ibv_dereg_mr) UNUSED(ibv_destroy_comp_channel) UNUSED(ibv_destroy_cq) UNUSED(ibv_destroy_qp)
UNUSED(ibv_free_device_list) UNUSED(ibv_get_cq_event) UNUSED(ibv_modify_qp) UNUSED(ibv_query_gid) UNUSED(ibv_wc_status_str)
C
cat >"$folder/verbs.map" <<'MAP'
IBVERBS_1.0 { ibv_create_comp_channel; ibv_destroy_comp_channel; };
IBVERBS_1.1 { ibv_*; };
MAP
cc -shared -fPIC -Wl,-soname,libibverbs.so.1 -Wl,--version-script="$folder/verbs.map" -o "$folder/libibverbs.so.1" "$folder/verbs.c"

cat >"$folder/judge.py" <<'PYTHON'
import asyncio
import contextlib
import ctypes
import socket
import subprocess
import sys

import infinistore

SIZE = 4 << 20


def serve(port):
    import uvloop

    infinistore.Logger.set_log_level("warning")
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    config = infinistore.ServerConfig(service_port=port, manage_port=port, dev_name="none", prealloc_size=1, minimal_allocate_size=64)
    infinistore.register_server(loop, config)
    print("serves", flush=True)
    loop.run_forever()


@contextlib.contextmanager
def store():
    """A client of a new and empty store."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port = made.getsockname()[1]
    server = subprocess.Popen([sys.executable, __file__, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        for line in server.stdout:
            if line == "serves\n":
                break
        config = infinistore.ClientConfig(host_addr="127.0.0.1", service_port=port, connection_type=infinistore.TYPE_TCP)
        client = infinistore.InfinityConnection(config)
        with contextlib.redirect_stdout(sys.stderr):
            client.connect()
        yield client
        client.close()
    finally:
        server.kill()
        server.wait()


value = (ctypes.c_ubyte * SIZE)()


def write(client, *keys):
    for key in keys:
        client.tcp_write_cache(key, ctypes.addressof(value), SIZE)


def until_gone(client, watched, others):
    """Writes keys until the watched one is gone; the keys."""
    written = []
    for key in others:
        if not client.check_exist(watched) or len(written) == 1000:
            return written
        write(client, key)
        written.append(key)


def there(client, keys):
    return [number for number, key in enumerate(keys) if client.check_exist(key)]


def names(of):
    return (f"{of} {number}" for number in range(10_000))


def judge():
    with store() as client:
        prompt = [f"prompt {number}" for number in range(128)]
        write(client, *prompt)
        others = until_gone(client, prompt[0], names("other"))
        left = there(client, prompt)
        assert left == list(range(left[0], 128))
        print(f"prompt of 128 blocks, then {len(others)} others:", end=" ")
        print(f"get_match_last_index {client.get_match_last_index(prompt)}, blocks there {left[0]} to {left[-1]}")
    with store() as client:
        older = [f"older {number}" for number in range(100)]
        write(client, "twice", *older, "twice")
        younger = until_gone(client, "twice", names("younger"))
        print(f"written, 100 others, written again, {len(younger)} others: there {client.check_exist('twice')},", end=" ")
        print(f"of the 100 written before it there {len(there(client, older))}, of the {len(younger)} there {len(there(client, younger))}")
    with store() as client:
        write(client, "other")
        same = until_gone(client, "other", iter(["same"] * 10_000))
        print(f"one key written {len(same)} times: the only other key there {client.check_exist('other')}")


if len(sys.argv) > 1:
    serve(int(sys.argv[1]))
else:
    judge()
PYTHON

cat >"$folder/expected" <<'TEXT'
prompt of 128 blocks, then 117 others: get_match_last_index 127, blocks there 40 to 127
written, 100 others, written again, 143 others: there False, of the 100 written before it there 61, of the 143 there 143
one key written 244 times: the only other key there False
TEXT
LD_LIBRARY_PATH=$folder "$folder/venv/bin/python" "$folder/judge.py" 2>"$folder/errors" | tee "$folder/seen"
if ! diff -u "$folder/expected" "$folder/seen"; then
  tail -n 20 "$folder/errors" >&2
  exit 1
fi
