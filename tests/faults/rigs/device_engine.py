"""An engine on an emulated device that saves, loads, aborts, cancels and changes its memory at random, and checks every byte.

    python -m tests.faults.rigs.device_engine SOCKET SEED SECONDS

Ends with exit code 0 whatever becomes of the daemon or of time; with another one at a wrong byte, of which it prints whose it
is. Prints its counts in the end. Chains and bytes derive from numbers, so that every engine knows those of all.
"""

import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import kvpool_client as kv
from kvpool_client.copying.cache import Cache
from tests.rigs.device.engine import DeviceKv
from tests.rigs.payload import chunk_bytes_of, tokens_of

LAYOUT = kv.Layout(layers=8, kv_heads=2, head_dim=16, dtype="float16", chunk_tokens=64)
MODEL = "device-lives"
CHAINS, CHUNKS = 15, 6
SHARED = 2  # leading chunks that chains have in common, three of them each
BLOCK_TOKENS = 16
PER_CHUNK = LAYOUT.chunk_tokens // BLOCK_TOKENS
BLOCKS = 32
TIMEOUT_S = 2.0
# A reservation has expired after the first, and its connection is ended after the second.
EXPIRED_S, OVERDUE_S = 1.1, 6.3

Bytes = npt.NDArray[np.uint8]


class WrongBytes(AssertionError):
    """A load brought other bytes than its keys', or wrote after it was cancelled."""


def chain_tokens(number: int, chunks: int = CHUNKS) -> npt.NDArray[np.int32]:
    """The tokens of a chain."""
    shared = tokens_of(9_000 + number // 3, SHARED * LAYOUT.chunk_tokens)
    own = tokens_of(number, (CHUNKS - SHARED) * LAYOUT.chunk_tokens)
    return np.concatenate((shared, own))[: chunks * LAYOUT.chunk_tokens]


@dataclass(frozen=True)
class Memory:
    """An engine's arrays as they are registered, and what it has written there."""

    arrays: DeviceKv
    cache: Cache
    mirror: list[npt.NDArray[np.uint16]]

    @classmethod
    def make(cls, pool: kv.Pool, form: str) -> "Memory":
        """New arrays."""
        made = DeviceKv(LAYOUT, form, BLOCKS)
        mirror = [np.zeros(made.shape, np.uint16) for _ in made.arrays]
        return cls(made, pool.register(made.arrays, BLOCK_TOKENS, form), mirror)

    def write(self, ids: list[int], rows: list[Bytes]) -> None:
        """Write a chunk to each so many blocks."""
        for number, row in enumerate(rows):
            chosen = ids[number * PER_CHUNK : (number + 1) * PER_CHUNK]
            parts = row.view(np.uint16).reshape(LAYOUT.layers, 2, PER_CHUNK, BLOCK_TOKENS, -1)
            for array, planes in zip(self.mirror, parts, strict=True):
                if self.arrays.form == "kv_first":
                    array[:, chosen] = planes
                else:
                    array[chosen] = planes.swapaxes(0, 1)
        self.arrays.write(self.mirror)

    def clear(self, ids: list[int], dice: random.Random) -> None:
        """Write what is no chunk's."""
        row = np.full(LAYOUT.chunk_bytes, dice.randrange(256), np.uint8)
        self.write(ids, [row] * (len(ids) // PER_CHUNK))


class Engine:
    """See the module."""

    def __init__(self, socket: str, seed: int) -> None:
        self._socket = socket
        self._dice = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._connect()

    def close(self) -> None:
        """Its end."""
        self._pool.close()

    def turn(self) -> None:
        """Something at random."""
        drawn = self._dice.random()
        if drawn < 0.45:
            self._save()
        elif drawn < 0.92:
            self._load()
        elif drawn < 0.985:
            self._memory = Memory.make(self._pool, self._dice.choice(("kv_first", "block_first")))
        else:
            self._pool.close()
            self._connect()

    def _connect(self) -> None:
        self._pool = kv.connect(self._socket, model=MODEL, layout=LAYOUT, timeout_s=TIMEOUT_S)
        self._memory = Memory.make(self._pool, "kv_first")

    def _chain(self) -> kv.KeyChain:
        return self._pool.keys(chain_tokens(self._dice.randrange(CHAINS), self._dice.randint(1, CHUNKS)))

    def _ids(self, chunks: int) -> list[int]:
        return self._dice.sample(range(BLOCKS), chunks * PER_CHUNK)

    def _save(self) -> None:
        keys, memory = self._chain(), self._memory
        ids = self._ids(len(keys))
        memory.write(ids, [chunk_bytes_of(keys[at], LAYOUT.chunk_bytes) for at in range(len(keys))])
        save = self._pool.save(keys, cache=memory.cache, block_ids=ids)
        for layer in self._dice.sample(range(LAYOUT.layers), self._dice.randint(0, LAYOUT.layers)):
            save.layer(layer)
        drawn = self._dice.random()
        if drawn < 0.2:
            time.sleep(self._dice.choice((0.0, 0.002, 0.01)))
            save.abort()
        else:
            time.sleep(EXPIRED_S if drawn < 0.23 else OVERDUE_S if drawn < 0.235 else 0.0)
            save.commit(wait=drawn < 0.6)
        result = save.wait()
        memory.clear(ids, self._dice)  # nobody reads it any more
        self.counts["saved_chunks"] += result.stored
        self.counts.update(f"save_{reason}" for reason in result.reasons)

    def _load(self) -> None:
        keys, memory = self._chain(), self._memory
        with self._pool.acquire(self._pool.lookup(keys)) as lease:
            if not lease.chunks:
                self.counts["misses"] += 1
                return
            first = self._dice.randrange(lease.chunks) if self._dice.random() < 0.2 else 0
            ids = self._ids(lease.chunks - first)
            memory.clear(ids, self._dice)
            time.sleep(EXPIRED_S if self._dice.random() < 0.02 else 0.0)
            load = self._pool.load(lease, memory.cache, ids, first_chunk=first)
            is_cancelled = self._dice.random() < 0.4
            if is_cancelled:
                if self._dice.random() < 0.7:
                    load.wait_layer(self._dice.randrange(LAYOUT.layers))
                load.cancel()
            before = memory.arrays.read() if is_cancelled else []
            result = load.wait()
            self.counts["loaded_chunks"] += max(0, result.chunks - first)
            self.counts["leased_copies"] += lease.tiers.tolist().count(kv.Level.HBM)
            self.counts[f"load_{result.reason}"] += 1
            self._compare(keys, first, result, ids)
        if is_cancelled and any(not np.array_equal(*each) for each in zip(before, memory.arrays.read(), strict=True)):
            raise WrongBytes("a load has written after it was cancelled")

    def _compare(self, keys: kv.KeyChain, first: int, result: kv.LoadResult, ids: list[int]) -> None:
        if result.chunks <= first:
            return
        found = self._memory.arrays.chunks(ids, len(ids) // PER_CHUNK)
        for chunk in range(first, result.chunks):
            expected = chunk_bytes_of(keys[chunk], LAYOUT.chunk_bytes).tobytes()
            if found[chunk - first] != expected:
                raise WrongBytes(f"chunk {chunk} of {result}: {self._whose(found[chunk - first], expected)}")

    def _whose(self, found: bytes, expected: bytes) -> str:
        """Whose bytes a chunk has, layer by layer."""
        size = LAYOUT.layer_bytes
        of_layer = {expected[at : at + size]: "its own" for at in range(0, len(expected), size)}
        for number in range(CHAINS):
            keys = self._pool.keys(chain_tokens(number))
            for chunk in range(CHUNKS):
                row = chunk_bytes_of(keys[chunk], LAYOUT.chunk_bytes).tobytes()
                for layer in range(LAYOUT.layers):
                    name = f"layer {layer} of chunk {chunk} of chain {number}"
                    of_layer.setdefault(row[layer * size : (layer + 1) * size], name)
        parts = [found[at : at + size] for at in range(0, len(found), size)]
        return ", ".join(of_layer.get(part, f"{part[:4].hex()}…") for part in parts)


def main(socket: str, seed: int, seconds: float) -> None:
    """Turns for so long."""
    engine, end = Engine(socket, seed), time.monotonic() + seconds
    while time.monotonic() < end:
        engine.turn()
    engine.close()
    print(json.dumps(engine.counts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
