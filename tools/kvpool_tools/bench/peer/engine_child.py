"""Processes of `bench peer` for TransferEngine and NIXL, whose output goes nowhere: the library writes to it as it likes.

    reader    moves bytes as that of a daemon does
    library   of TransferEngine: its memory is read, or reads whole chunks by calls of the library alone
    owner     the owner's side of kvpool over either, with a reader of its own

The library's reads are made in two ways. `batches`: synchronous calls of BATCH chunks each, which keep a core busy while they
wait. `reads`: an asynchronous call for each chunk, AT_ONCE of them under way, looked after with naps as kvpool does it. Each
of so many threads reads a share of the chunks.
"""

import mmap
import os
import sys
import time
from collections.abc import Mapping
from threading import Thread
from typing import Any

from kvpool.clock import Deadline
from kvpool.transfer.child.process import module_command
from kvpool.transfer.child.service import DaemonLink, serve
from kvpool.transfer.engine.child import NAP_S, connect
from kvpool.transfer.engine.child import run as serve_reads
from kvpool.transfer.engine.library import TransferEngineClient, connect_engine
from kvpool_tools.bench.peer.node import LONG_S
from kvpool_tools.bench.peer.owner import connect_owner, serve_owner

READER, LIBRARY, OWNER = "reader", "library", "owner"
BATCHES, READS = "batches", "reads"
# A library's call refuses more than a thousand.
BATCH = 64
AT_ONCE = 64
# Of the library's own deadline: a batch on a busy machine takes longer than the 5 s that a daemon allows.
LIBRARY_TIMEOUT_S = 30
FAILED = -1


def command_of(role: str) -> tuple[str, ...]:
    """The command of a process."""
    return (*module_command("kvpool_tools.bench.peer.engine_child"), role)


def connect_library(settings: Mapping[str, Any], memory: mmap.mmap) -> TransferEngineClient:
    """See `connect_engine`."""
    os.environ["MC_TRANSFER_TIMEOUT"] = str(LIBRARY_TIMEOUT_S)
    return connect_engine(settings, memory)


def serve_library(link: DaemonLink, client: TransferEngineClient) -> None:
    """Answer requests to read: way, server, address of its first chunk, size of a chunk, chunks, and threads."""
    for number, way, server, base, *sizes in link.requests():
        link.answer(number, [_read_shares(client, way, (server, base), sizes)])


def _read_shares(client: TransferEngineClient, way: str, source: tuple[str, int], sizes: list[int]) -> int:
    size, chunks, streams = sizes
    share, codes = chunks // streams, [0] * streams
    read = _read_batches if way == BATCHES else _read_each

    def run(stream: int) -> None:
        offsets = [size * chunk for chunk in range(stream * share, (stream + 1) * share)]
        codes[stream] = read(client, source, offsets, size)

    threads = [Thread(target=run, args=(stream,)) for stream in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return min(codes)


def _read_batches(client: TransferEngineClient, source: tuple[str, int], offsets: list[int], size: int) -> int:
    (server, base), own = source, int(client.facts["base"])
    for first in range(0, len(offsets), BATCH):
        some = offsets[first : first + BATCH]
        targets, sources = [own + offset for offset in some], [base + offset for offset in some]
        code: int = client.library.batch_transfer_sync_read(server, targets, sources, [size] * len(some))
        if code:
            return min(code, FAILED)
    return 0


def _read_each(client: TransferEngineClient, source: tuple[str, int], offsets: list[int], size: int) -> int:
    (server, base), deadline = source, Deadline(LONG_S)
    running: list[int] = []
    left = iter(offsets)
    while True:
        while len(running) < AT_ONCE and (offset := next(left, None)) is not None:
            number = client.submit(server, offset, base + offset, size)
            if not number:
                return FAILED
            running.append(number)
        if not running:
            return 0
        codes = [client.look(number) for number in running]
        if FAILED in codes or deadline.has_passed():
            return FAILED
        if not any(codes):
            time.sleep(NAP_S)
        running = [number for number, code in zip(running, codes, strict=True) if not code]


def main(role: str, *arguments: str) -> None:
    """Serve the process that started this one."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    if role == READER:
        serve(list(arguments), connect, serve_reads)
    elif role == LIBRARY:
        serve(list(arguments), connect_library, serve_library)
    else:
        serve(list(arguments), connect_owner, serve_owner)


if __name__ == "__main__":
    main(*sys.argv[1:])
