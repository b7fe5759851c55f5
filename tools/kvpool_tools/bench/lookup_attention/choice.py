"""Choice of what `bench sparse` measures: sizes, resident sets, budgets and threads, as options name them. Immutable."""

import os
import re
from dataclasses import dataclass, field

from kvpool.errors import InvalidArgument
from kvpool.layout import Layout
from kvpool_sparse import SparseConfig

CHUNK_TOKENS = 256
TOKENS = "128k"
QUICK_TOKENS = "16k"
# With the default sizes 512 MiB of KV each: as many as stay below 3 GiB with their summaries.
LAYERS = 5
BUDGETS = "5,20"
RESIDENT = "1024+7192,128+1024"
THREADS = "1,2"
ROUNDS = 21
QUICK_ROUNDS = 2
PERCENT = 100
_TOKENS = re.compile(r"(\d+)([km]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}
# The sizes for which bars are known.
DEFAULT_SIZES = (128 << 10, 32, 8, 128)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The model's attention: one layer's heads, and the length of the sequence."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int

    def __post_init__(self) -> None:
        if self.tokens % CHUNK_TOKENS or not self.tokens:
            raise InvalidArgument(f"--tokens is {self.tokens}, expected a multiple of {CHUNK_TOKENS}")
        if self.heads % self.kv_heads:
            raise InvalidArgument(f"--heads is {self.heads}, expected a multiple of --kv-heads {self.kv_heads}")

    @property
    def layout(self) -> Layout:
        """The layout of such a sequence's KV."""
        return Layout(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype="bfloat16",
            chunk_tokens=CHUNK_TOKENS,
        )

    @property
    def layer_kv_bytes(self) -> int:
        """KV of all tokens of a layer: what full attention reads."""
        return self.tokens * self.layout.token_plane_bytes * 2

    @property
    def has_bars(self) -> bool:
        """Whether it is known how fast these sizes ought to be."""
        return (self.tokens, self.heads, self.kv_heads, self.head_dim) == DEFAULT_SIZES


@dataclass(frozen=True, slots=True)
class Choice:
    """What is measured: every number of threads with every resident set and budget."""

    sizes: Sizes
    configs: tuple[SparseConfig, ...]
    threads: tuple[int, ...]
    rounds: int = ROUNDS
    paths: bool = field(default=False)


def short_choice(*, is_quick: bool) -> Choice:
    """The default resident set with the smaller budget, at the sizes for which bars are known."""
    tokens, heads, kv_heads, head_dim = DEFAULT_SIZES
    sizes = Sizes(parse_tokens(QUICK_TOKENS) if is_quick else tokens, heads, kv_heads, head_dim, LAYERS)
    configs = parse_configs(RESIDENT, BUDGETS, sizes.tokens)[:1]
    return Choice(sizes, configs, parse_threads(None), QUICK_ROUNDS if is_quick else ROUNDS)


def parse_tokens(text: str) -> int:
    """Tokens of `131072` or `128k`. Raises InvalidArgument."""
    match = _TOKENS.fullmatch(text.strip())
    if match is None:
        raise InvalidArgument(f"{text!r} is no number of tokens, expected one such as 131072 or 128k")
    return int(match.group(1)) * _UNITS[match.group(2).lower()]


def parse_configs(resident: str, budgets: str, tokens: int) -> tuple[SparseConfig, ...]:
    """A configuration for each resident set `INIT+LOCAL` and budget in percent, with commas between. Raises InvalidArgument."""
    configs = []
    for text in resident.split(","):
        init, plus, local = text.partition("+")
        if not plus:
            raise InvalidArgument(f"--resident is {text!r}, expected INIT+LOCAL such as 1024+7192")
        for percent in budgets.split(","):
            config = SparseConfig(
                init_tokens=parse_tokens(init),
                local_tokens=parse_tokens(local),
                topk_share=_share(percent),
                dense_boundary=0,
                offload_boundary=2 * tokens,
            )
            if not config.middle_blocks(tokens):
                raise InvalidArgument(f"--resident {text} leaves nothing to look up of {tokens} tokens")
            configs.append(config)
    return tuple(configs)


def parse_threads(text: str | None) -> tuple[int, ...]:
    """Numbers of threads with commas between; by default 1 and 2, where there are two processors. Raises InvalidArgument."""
    cores = len(os.sched_getaffinity(0))
    if text is None:
        return tuple(count for count in (1, 2) if count <= cores)
    counts = text.split(",")
    if not all(count.strip().isdecimal() and int(count) for count in counts):
        raise InvalidArgument(f"--threads is {text!r}, expected numbers such as {THREADS}")
    return tuple(int(count) for count in counts)


def _share(percent: str) -> float:
    try:
        share = float(percent) / PERCENT
    except ValueError:
        share = -1.0
    if not 0.0 < share <= 1.0:
        raise InvalidArgument(f"--budgets has {percent!r}, expected percentages above 0 and up to 100")
    return share
