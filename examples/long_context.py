"""Questions on one long document, each answered by lookup: `python -m examples.long_context`.

The document's KV is computed once. What has left the window lies in a daemon's memory, together with summaries of its blocks;
this process has the window alone. Each question is a fork of the document's sequence and is answered twice, by lookup and by
full attention over the same bytes. A second run with --socket and the same document takes its KV from the pool.

The document is text of Python's own library, a token for each byte, and the model a small Qwen2 with random weights: nothing is
downloaded, and what it answers means nothing. A directory with a real model (--model) brings its tokenizer along. The default
64k tokens take 150 s of CPU time to compute, on two processors half of that; --tokens 8192 takes a few seconds.

Starts a daemon of its own where --socket names none. One thread, and the native threads of each step.
"""

import inspect
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import kvpool_client as kv
from demo.node import Daemon
from kvpool.units import format_size
from kvpool_sparse import SparseConfig, SparseSequence
from kvpool_sparse.transformers_attention import ATTENTION, SparseCache, layout_of_model, register
from kvpool_tools.bench.machine import describe_machine
from kvpool_tools.cli.output import print_line, print_table

TOKENS = 64 << 10
# As many tokens of a prompt as are computed at once.
PART_TOKENS = 2048
CHUNK_TOKENS = 256
BLOCK_TOKENS = 128
# First tokens and window, of a document of 64k tokens; in proportion for others.
INIT_TOKENS, LOCAL_TOKENS = 1024, 7192
QUESTIONS = (
    "Which exceptions does this raise, and where are they caught?",
    "Where is the first function defined that takes no arguments?",
    "What is imported here that is never used?",
)
SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": None,
    # Large enough that tokens depend on what was attended to.
    "initializer_range": 0.1,
}
SEED = 7


class Bytes:
    """A tokenizer with a token for each byte."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return bytes(ids).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens, the seconds until the first of them and for the others, and the sequence's counters."""

    ids: list[int]
    first_s: float
    others_s: float
    stats: dict[str, int | float]

    @property
    def rate(self) -> float:
        """Tokens in a second, after the first."""
        return (len(self.ids) - 1) / self.others_s


class Reader:
    """A model that attends by lookup, its tokenizer, and the document that it has read."""

    def __init__(self, model: Any, tokenizer: Any, ids: list[int]) -> None:
        register()
        model.set_attn_implementation(ATTENTION)
        self.model = model
        self.tokenizer = tokenizer
        self.ids = ids
        # transformers has renamed it in one of the releases that are supported.
        names = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"

    def forward(self, ids: Sequence[int], cache: SparseCache) -> int:
        """Append tokens to the cache. The greedy token that follows."""
        tensor = torch.tensor([list(ids)])
        out = self.model(tensor, use_cache=True, logits_to_keep=1, **{self._cache_argument: cache})
        return int(out.logits[0, -1].argmax())

    def read(self, cache: SparseCache, advance: Callable[[int], None]) -> None:
        """Compute the KV of the document, but for what the pool has of it."""
        for begin in range(cache.prefix_tokens, len(self.ids), PART_TOKENS):
            part = self.ids[begin : begin + PART_TOKENS]
            self.forward(part, cache)
            advance(len(part))

    def answer(self, document: SparseSequence, question: Sequence[int], count: int, config: SparseConfig) -> Answer:
        """Answer a question about the document with so many tokens, by a fork that attends as `config` says."""
        fork = document.fork(config)
        with SparseCache.of([fork]) as cache:
            began = time.perf_counter()
            ids = [self.forward(question, cache)]
            first = time.perf_counter()
            while len(ids) < count:
                ids.append(self.forward(ids[-1:], cache))
            ended = time.perf_counter()
            return Answer(ids, first - began, ended - first, fork.stats())


def make_model(directory: str | None) -> tuple[Any, Any]:
    """Model and tokenizer, of a directory or small and with random weights."""
    if directory is not None:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype="auto")
        return model.eval(), tokenizer
    torch.manual_seed(SEED)
    small: Any = Qwen2ForCausalLM(Qwen2Config(**SMALL, max_position_embeddings=2 * TOKENS))
    return small.eval(), Bytes()


def document_ids(path: str | None, tokenizer: Any, tokens: int) -> list[int]:
    """So many tokens of a file, or of the sources of Python's library."""
    files = [Path(path)] if path is not None else sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    ids: list[int] = []
    for file in files:
        if len(ids) < tokens:
            ids += tokenizer.encode(file.read_text(errors="replace"))
    if len(ids) < tokens:
        raise click.UsageError(f"the document has {len(ids)} tokens: take fewer by --tokens")
    return ids[:tokens]


def config_for(tokens: int, budget: float) -> SparseConfig:
    """First tokens and window in proportion to the document; lookup and offload from half of it on."""
    blocks = max(1, INIT_TOKENS * tokens // TOKENS // BLOCK_TOKENS)
    return SparseConfig(
        init_tokens=blocks * BLOCK_TOKENS,
        local_tokens=LOCAL_TOKENS * tokens // TOKENS,
        topk_share=budget / 100,
        block_tokens=BLOCK_TOKENS,
        dense_boundary=tokens // 2,
        offload_boundary=tokens // 2,
    )


@contextmanager
def daemon_for(layout: kv.Layout, tokens: int, socket: str | None) -> Iterator[str]:
    """The socket of a daemon: the one that was named, or one for this run with room for the document."""
    if socket is not None:
        yield socket
        return
    # A connection may have leased half of a daemon's memory.
    stored = -(-tokens // layout.chunk_tokens) * layout.stored_bytes
    capacity = f"{4 * stored // (1 << 20) + 64}MiB"
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-long-") as name,
        Daemon(Path(name), dram_capacity=capacity, ssd_capacity="256MiB") as daemon,
    ):
        yield str(daemon.socket)


@contextmanager
def progress() -> Iterator[Progress]:
    """A bar on standard error, gone at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=Console(stderr=True), transient=True) as bar:
        yield bar


def read_document(reader: Reader, cache: SparseCache) -> None:
    """Read the document under a progress bar, wait until it is stored, and say what it takes."""
    (row,), layout = cache.rows, cache.rows[0].layout
    computed = len(reader.ids) - cache.prefix_tokens
    began = time.perf_counter()
    with progress() as bar:
        task = bar.add_task(f"reading {computed} tokens", total=computed)
        reader.read(cache, lambda count: bar.advance(task, count))
    read_s = time.perf_counter() - began
    stored = row.settle()
    whole = len(reader.ids) * layout.token_plane_bytes * 2 * layout.layers
    print_line(f"{cache.prefix_tokens} tokens from the pool, {computed} computed in {read_s:.1f} s")
    print_line(
        f"KV of the whole: {format_size(whole)}; in this process: {format_size(row.own_bytes)} ({row.own_bytes / whole:.0%}); "
        f"in the daemon's memory: {stored} chunks of {layout.chunk_tokens} tokens"
    )


def compared(number: int, dense: Answer, sparse: Answer) -> dict[str, object]:
    """A row of the table: rates of both, how much was read and how much of the mass that was, and how far tokens are equal."""
    equal = next(
        (at for at, (one, other) in enumerate(zip(dense.ids, sparse.ids, strict=True)) if one != other), len(dense.ids)
    )
    stats = sparse.stats
    return {
        "question": number,
        "dense_tokens_per_s": round(dense.rate, 1),
        "sparse_tokens_per_s": round(sparse.rate, 1),
        "ratio": round(sparse.rate / dense.rate, 2),
        "first_token_s": round(sparse.first_s, 2),
        "blocks_read": f"{stats['recalled_blocks'] / max(1, stats['middle_blocks']):.1%}",
        "kept_mass": round(stats["kept_mass"], 3),
        "equal_tokens": f"{equal} of {len(dense.ids)}",
        "own_bytes": format_size(int(stats["own_bytes"])),
    }


def asked(count: int | None) -> Iterator[str]:
    """Questions: so many made-up ones, or those that somebody types; an empty line ends them."""
    if count is not None:
        yield from (QUESTIONS[number % len(QUESTIONS)] for number in range(count))
        return
    with suppress(click.Abort):  # Ctrl-D ends them, too
        while line := click.prompt("question (empty: end)", default="", show_default=False):
            yield line


@click.command()
@click.option("--tokens", type=click.IntRange(min=1024), default=TOKENS, show_default=True, help="Of the document.")
@click.option(
    "--document", type=click.Path(exists=True, dir_okay=False), help="A text to read instead of Python's library."
)
@click.option(
    "--model", type=click.Path(exists=True, file_okay=False), help="A local model of Qwen2's or Llama's kind."
)
@click.option("--questions", type=click.IntRange(min=1), help="Ask so many made-up ones (default: 3, or typed ones).")
@click.option("--answer-tokens", type=click.IntRange(min=2), default=48, show_default=True, help="Of each answer.")
@click.option(
    "--budget", type=click.FloatRange(0, 100), default=5.0, show_default=True, help="Percent of middle blocks."
)
@click.option("--socket", help="A daemon that runs already (default: one of its own).")
@torch.inference_mode()
def main(
    tokens: int,
    document: str | None,
    model: str | None,
    questions: int | None,
    answer_tokens: int,
    budget: float,
    socket: str | None,
) -> None:
    """Ask questions about a long document, by lookup and by full attention."""
    count = questions if questions is not None or sys.stdin.isatty() else len(QUESTIONS)
    loaded, tokenizer = make_model(model)
    reader = Reader(loaded, tokenizer, document_ids(document, tokenizer, tokens))
    sparse = config_for(tokens, budget)
    boundary = 2 * tokens + answer_tokens
    dense = replace(sparse, dense_boundary=boundary, offload_boundary=boundary)
    dtype = str(loaded.dtype).removeprefix("torch.")
    layout = layout_of_model(loaded.config, chunk_tokens=CHUNK_TOKENS, dtype=dtype)
    print_line("{processor}, {cores} cores, load average {load_average_before} before".format(**describe_machine()))
    rows = []
    with ExitStack() as stack:
        path = stack.enter_context(daemon_for(layout, tokens, socket))
        name = "long-context" if model is None else f"long-context {Path(model).resolve()}"
        pool = stack.enter_context(kv.connect(path, model=name, revision="1", layout=layout, timeout_s=10.0))
        cache = stack.enter_context(SparseCache(pool, sparse, tokens=reader.ids))
        read_document(reader, cache)
        row = cache.rows[0]
        assert isinstance(row, SparseSequence), "the model is on the processor"
        for number, text in enumerate(asked(count), 1):
            answers = {}
            for config in (dense, sparse) if number % 2 else (sparse, dense):
                answers[config] = reader.answer(row, tokenizer.encode(text), answer_tokens, config)
            rows.append(compared(number, answers[dense], answers[sparse]))
            print_line(f"{number}: {text}")
            print_line(f"   {tokenizer.decode(answers[sparse].ids)}")
    if rows:
        print_table(f"{tokens} tokens, {budget:g} % of the middle blocks", rows, columns_max=len(rows[0]))
        if model is None:
            print_line("the weights are random: tokens are nearly tied, and once they differ they go different ways")


if __name__ == "__main__":
    main()
