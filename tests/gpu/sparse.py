"""Part `sparse`: a decoding step by lookup on the device against full attention there, with all KV on the device.

Full attention is torch's own of the same shapes. The KV is made up, in memory of this process, as in `kvpoolctl bench sparse`.
"""

import tempfile
from pathlib import Path
from typing import cast

import kvpool_client as kv
from kvpool_tools.bench.lookup_attention.choice import Choice, Sizes, parse_configs
from kvpool_tools.bench.lookup_attention.device_steps import measure_device
from kvpool_tools.bench.lookup_attention.measured_sequence import MeasuredSequence
from tests.gpu import setting

HEADS, KV_HEADS, HEAD_DIM = (4, 2, 32) if setting.IS_REHEARSAL else (32, 8, 128)
LENGTHS = (16 << 10,) if setting.IS_REHEARSAL else (32 << 10, 128 << 10, 512 << 10)
LAYERS = 2
RESIDENT, BUDGET, THREADS = "128+1024", "5", 4
BAR_TOKENS, BAR = 128 << 10, 4.0


def main() -> None:
    """Each length by itself."""
    for tokens in LENGTHS:
        _measure(tokens)


def _measure(tokens: int) -> None:
    sizes = Sizes(tokens, HEADS, KV_HEADS, HEAD_DIM, LAYERS)
    choice = Choice(sizes, parse_configs(RESIDENT, BUDGET, tokens), (THREADS,), rounds=setting.ROUNDS)
    with tempfile.TemporaryDirectory() as directory:
        absent = Path(directory) / "no-daemon"
        with kv.connect(str(absent), model="made-up", layout=sizes.layout) as pool:
            sequence = MeasuredSequence(pool, sizes)
            for _ in sequence.fill():
                pass
            for number in range(sequence.pages):
                sequence.summarise_page(number)
            rows = measure_device(sequence, choice, setting.TORCH_DEVICE, lambda _total: None)
            sequence.close()
    for row in rows:
        least, most = cast("list[float]", row["step_spread_ms"])
        staged_steps = cast(float, row["staged_steps"])
        setting.figure(
            f"step of {tokens >> 10}K tokens, {BUDGET} %, staging area of {staged_steps:g} steps",
            [least, cast(float, row["step_ms"]), most],
            "ms",
            ratio=cast(float, row["ratio"]),
            bar=BAR if tokens == BAR_TOKENS and staged_steps > 1 else None,
        )


if __name__ == "__main__":
    main()
