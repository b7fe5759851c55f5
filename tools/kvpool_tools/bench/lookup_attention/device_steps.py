"""Steps of `bench sparse` on a CUDA device: what a step costs a layer, and how much of what it wants is staged.

Queries drift from step to step, so that consecutive steps want partly the same blocks: a made-up overlap, reported beside
the hits. The floor is torch's full attention of the same shapes, whose KV is all on the device. Where torch sees no CUDA device
there are no rows, but the reason. Main thread of a command.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import numpy as np

from kvpool_sparse.results import Floats
from kvpool_tools.bench.lookup_attention.choice import PERCENT, Choice
from kvpool_tools.bench.lookup_attention.measured_sequence import MeasuredSequence
from kvpool_tools.bench.lookup_attention.timings import milliseconds
from kvpool_tools.bench.measure import median, timed_s

Row = dict[str, object]
# How much of a query stays in the next one (a guess at neighbouring tokens).
QUERY_KEPT = 0.9
# Sizes of the staging area, in all that a step of all layers wants: one that keeps it, one that the layers share.
STAGED_STEPS = (2.0, 0.5)
SEED = 12


def missing_device() -> str | None:
    """Why there are no steps on a device; None where there is one."""
    if find_spec("torch") is None:
        return "torch is not installed"
    import torch  # an optional heavy dependency

    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def measure_device(
    sequence: MeasuredSequence, choice: Choice, device: str, advance: Callable[[int], None]
) -> list[Row]:
    """A row for each resident set, budget and size of the staging area, on this device."""
    rows: list[Row] = []
    dense = _dense_seconds(choice, device)
    for config in choice.configs:
        sequence.become(config, choice.threads[-1])
        for steps in STAGED_STEPS:
            rows.append(_row(sequence, choice, steps, device=device, dense=dense))
            advance(len(choice.configs) * len(STAGED_STEPS))
    return rows


def _dense_seconds(choice: Choice, device: str) -> list[float]:
    """Seconds of full attention of one query over all tokens of a layer, for each round."""
    import torch  # an optional heavy dependency

    sizes = choice.sizes
    shape, group = (1, sizes.kv_heads, sizes.tokens, sizes.head_dim), sizes.heads // sizes.kv_heads
    keys, values = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    query = torch.randn((1, sizes.kv_heads, group, sizes.head_dim), dtype=torch.bfloat16, device=device)

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, keys, values)
        if keys.is_cuda:
            torch.cuda.synchronize(keys.device)

    attend()  # warms
    return [timed_s(attend) for _ in range(choice.rounds)]


def _row(
    sequence: MeasuredSequence, choice: Choice, staged_steps: float, *, device: str, dense: Sequence[float]
) -> Row:
    import torch  # an optional heavy dependency

    from kvpool_sparse.device import DeviceSequence  # imports torch

    sizes, layers, config = choice.sizes, range(choice.sizes.layers), sequence.config
    per_step = config.blocks_to_take(config.middle_blocks(sizes.tokens)) * sizes.kv_heads * sizes.layers
    random = np.random.default_rng(SEED)
    queries = [random.standard_normal((sizes.heads, sizes.head_dim), np.float32) for _ in layers]
    with DeviceSequence(sequence.fork(), device=device, staging_blocks=int(staged_steps * per_step)) as there:

        def step() -> None:
            for layer in layers:
                there.attend(layer, torch.from_numpy(queries[layer]).to(there.device))
            if there.device.type == "cuda":
                torch.cuda.synchronize(there.device)

        seconds = []
        for number in range(choice.rounds + 1):
            taken = timed_s(step)
            if number:  # the first one warms
                seconds.append(taken / sizes.layers)
            queries = [_drifted(query, random) for query in queries]
        counts = there.stats()
        return {
            "name": f"{config.topk_share * PERCENT:g} % of {config.init_tokens}+{config.local_tokens}",
            "device": torch.cuda.get_device_name(there.device) if there.device.type == "cuda" else str(there.device),
            "tokens": sizes.tokens,
            "staged_steps": staged_steps,
            "rounds": len(seconds),
            **milliseconds("step", seconds),
            **milliseconds("dense", dense),
            "ratio": round(median(dense) / median(seconds), 2),
            "staging_hit_rate": round(counts["staging_hit_rate"], 3),
            "prefetch_share_of_hits": round(counts["staging_prefetch_hits"] / max(1, counts["staging_hits"]), 3),
            "overlap": round(counts["overlap"], 3),
            "device_mib": round(there.device_bytes / (1 << 20), 1),
        }


def _drifted(query: Floats, random: np.random.Generator) -> Floats:
    """The next step's query: of the same length, and QUERY_KEPT of this one."""
    other = random.standard_normal(query.shape, np.float32)
    found: Floats = np.float32(QUERY_KEPT) * query + np.float32((1 - QUERY_KEPT**2) ** 0.5) * other
    return found
