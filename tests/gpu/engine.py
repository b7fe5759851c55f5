"""Part `engine`: the engine of the demonstration with a model of random weights, and when its first token comes.

A prompt is answered three times: by an engine without a daemon, by one that saves what it computes, and by one that gets all
but the last chunk from the pool. All three give the same tokens: the computation is in steps of a chunk, so that cold and warm
compute the same (demo/engine.py says why).
"""

import random
import tempfile
from pathlib import Path

import kvpool_client as kv
from demo.engine import BLOCK_TOKENS, Answer, Engine, Shape, build_model
from demo.paged_kv import PagedKV
from kvpool_client.torch import PagedPrefixCache, layout_of
from tests.gpu import setting
from tests.rigs.daemon import Daemon, wait_connected

# On the GPU 0.9 billion weights.
SHAPE = (
    Shape(vocabulary=512, layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, feed_forward=128)
    if setting.IS_REHEARSAL
    else Shape(
        vocabulary=32000, layers=16, hidden=2048, heads=16, kv_heads=8, head_dim=128, feed_forward=5632, positions=65536
    )
)
DTYPE = "float32" if setting.IS_REHEARSAL else "bfloat16"
CHUNK_TOKENS = 32 if setting.IS_REHEARSAL else 256
PROMPTS = (200,) if setting.IS_REHEARSAL else (8 << 10, 32 << 10)
ANSWER_TOKENS = 8
DRAM = "64MiB" if setting.IS_REHEARSAL else "12GiB"
REGISTERED_S = 60.0
ROUNDS = 2 if setting.IS_REHEARSAL else 3
SEED = 7
MODEL = "random-llama"


def main() -> None:
    """One model, one daemon; each engine has blocks of its own."""
    setting.use_driver()
    model = build_model(SHAPE, SEED, device=setting.TORCH_DEVICE, dtype=DTYPE)
    paged = PagedKV(
        layers=SHAPE.layers,
        blocks=max(PROMPTS) // BLOCK_TOKENS + 8,
        block_tokens=BLOCK_TOKENS,
        kv_heads=SHAPE.kv_heads,
        head_dim=SHAPE.head_dim,
        seed=SEED,
        device=setting.TORCH_DEVICE,
        dtype=DTYPE,
    )
    layout = layout_of(paged.layers, CHUNK_TOKENS)
    with (
        tempfile.TemporaryDirectory() as directory,
        Daemon(Path(directory), **{"dram.capacity": DRAM, "dram.allow_overcommit": "true"}) as daemon,
        daemon.connect(layout, model=MODEL) as pool,
        kv.connect(f"{directory}/no-daemon", model=MODEL, layout=layout) as nothing,
    ):
        wait_connected(pool)
        warm, cold = (
            Engine(model, paged, PagedPrefixCache(one, paged.layers, BLOCK_TOKENS), step_tokens=CHUNK_TOKENS)
            for one in (pool, nothing)
        )
        for engine in (cold, warm, warm):  # first use of every kernel, and of the arena
            engine.answer([1] * (2 * CHUNK_TOKENS - 1), 2)
        setting.figure("arena registered after", [setting.wait_registered(pool, REGISTERED_S)], "s")
        for tokens in PROMPTS:
            _measure(tokens, warm, cold)


def _measure(tokens: int, warm: Engine, cold: Engine) -> None:
    ways: dict[str, list[Answer]] = {"without a pool": [], "and saves": [], "and hits": []}
    for number in range(ROUNDS):
        dice = random.Random(SEED + number)
        prompt = [dice.randrange(SHAPE.vocabulary) for _ in range(tokens)]
        for way, engine in zip(ways, (cold, warm, warm), strict=True):
            ways[way].append(engine.answer(prompt, ANSWER_TOKENS))
    without, saving, hitting = ways.values()
    for one, other, last in zip(without, saving, hitting, strict=True):
        assert one.tokens == other.tokens == last.tokens, "the answers differ"
        assert (other.reused_tokens, last.reused_tokens) == (0, (tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS)
    least = min(answer.ttft_s for answer in without)
    for way, answers in ways.items():
        times = [1e3 * answer.ttft_s for answer in answers]
        setting.figure(f"first token of {tokens} tokens, {way}", times, "ms", ratio=1e3 * least / min(times))


if __name__ == "__main__":
    main()
