"""Support table of vLLM's features: docs/engines.md shows it, refusals have their remedies from it, tests walk through it.

    python -m kvpool_client.vllm.support docs/engines.md

rewrites the page's part. Invariant: what is not served has a code, which the engine's metrics count it by, and a remedy, which
is logged with it. Any thread.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from kvpool.errors import LayoutMismatch

BEGIN, END = "<!-- served by vLLM's connector: begin -->", "<!-- served by vLLM's connector: end -->"


@dataclass(frozen=True, slots=True)
class Entry:
    """One row. `code` and `remedy` where it is not served."""

    feature: str
    text: str
    code: str = ""
    remedy: str = ""


TABLE = (
    Entry("tensor parallel", "yes, on one node: a prefix counts as far as every rank has it"),
    Entry(
        "engines of other tensor-parallel sizes and pipeline stages",
        "yes, with `kvpool.head_groups` ([Sizes that share](engines/vllm.md#sizes-that-share))",
    ),
    Entry(
        "`kvpool.head_groups` that do not divide the KV heads, or not the ranks",
        "no",
        "uneven_heads",
        "set kvpool.head_groups to the largest tensor-parallel size that is to share, a divisor of the model's KV heads",
    ),
    Entry(
        "`kvpool.head_groups` where an attention backend has the heads of a token together",
        "no",
        "token_major",
        "choose another backend with --attention-backend, or leave kvpool.head_groups out",
    ),
    Entry(
        "KV that several ranks hold identically (MLA; fewer KV heads than ranks)",
        "yes, stored once; of KV heads where all layers have one number of them",
    ),
    Entry(
        "pipeline parallel",
        "yes, on one node; shared by engines of the same stages; `kvpool.load: sync` becomes `async`",
    ),
    Entry(
        "pipeline stages with other layers of KV than vLLM's division gives them, such as a draft model's",
        "no",
        "pipeline_parallel",
        "start vLLM without --pipeline-parallel-size, or with --tensor-parallel-size in its place",
    ),
    Entry(
        "context parallel",
        "no",
        "context_parallel",
        "start vLLM without --decode-context-parallel-size and --prefill-context-parallel-size, or with "
        "--tensor-parallel-size in their place",
    ),
    Entry(
        "one engine's ranks or stages on several nodes, also where their daemons are peers",
        "no",
        "several_nodes",
        "place the ranks of an engine on one node (--tensor-parallel-size times --pipeline-parallel-size at most a node's "
        "devices), and use --data-parallel-size for other nodes",
    ),
    Entry("data parallel", "yes: replicas share chunks"),
    Entry(
        "producer, consumer (`kv_role`), `do_remote_prefill`, children of MultiConnector",
        "yes ([Roles](engines/vllm.md#roles))",
    ),
    Entry(
        "a second connector of kvpool's in one engine (another child of a MultiConnector)",
        "no",
        "second_child",
        "name kvpool once among the connectors, and let one daemon have both tiers",
    ),
    Entry("dual-batch overlap", "yes: a layer is saved when its last micro-batch has written it"),
    Entry("tenants (`cache_salt`)", "yes, apart by construction"),
    Entry(
        "LoRA",
        "yes, as its files were at its first request ([vLLM](engines/vllm.md#which-chunks-are-shared)); chunks of an adapter "
        "without files here are this start's alone",
    ),
    Entry("multimodal", "by vLLM's block hashes; not tested"),
    Entry(
        "weights that neither a directory, nor a commit of the Hub, nor `kvpool.model` identifies",
        "no",
        "unknown_weights",
        "set kvpool.model to a name that changes whenever the weights do",
    ),
    Entry(
        "sliding windows, beside full attention (Gemma 3, GPT-OSS) or alone",
        "yes: before the ends at which a prompt can go on ([Hybrid models](engines/vllm.md#hybrid-models))",
    ),
    Entry(
        "recurrent states (Mamba, linear attention) beside full attention (Qwen3-Next, Nemotron-H), with prefix caching",
        "yes: at the ends at which a prompt can go on ([Recurrent states](engines/vllm.md#recurrent-states))",
    ),
    Entry(
        "recurrent states without prefix caching",
        "no",
        "states_not_kept",
        "start vLLM with --enable-prefix-caching, so that it keeps states at the ends of blocks (--mamba-cache-mode align)",
    ),
    Entry(
        "recurrent states with speculative decoding",
        "no",
        "speculative_states",
        "start vLLM without --speculative-config",
    ),
    Entry("chunked local attention (Llama 4)", "yes: as a window of one of its pieces"),
    Entry(
        "encoders, cross attention",
        "no",
        "other_attention",
        "serve a model whose layers have full or local attention, sliding windows or recurrent states; others run without "
        "the pool",
    ),
    Entry(
        "sliding windows, states or several kinds of blocks in an engine of several pipeline stages",
        "yes, with `kvpool.head_groups`, where every stage has layers of every kind",
    ),
    Entry(
        "several kinds of blocks in pipeline stages that lack one, hide their layers, or have no `kvpool.head_groups`",
        "no",
        "staged_groups",
        "set kvpool.head_groups, 1 at least, and divide the layers so that each stage has every kind, or start vLLM without "
        "--pipeline-parallel-size",
    ),
    Entry(
        "MLA where vLLM computes it without prefix caching (CPUs without AMX)",
        "no",
        "mla_without_prefixes",
        "serve the model on a GPU, or on a processor with AMX",
    ),
    Entry("FP8 KV", "yes, with scales of the model"),
    Entry(
        "KV scales that are calculated while serving (`calculate_kv_scales`)",
        "no",
        "calculated_scales",
        "serve a model that brings its KV scales, or start vLLM with --kv-cache-dtype auto",
    ),
    Entry(
        "layers of other shapes in one group (other numbers of heads, a draft model's, an indexer's)",
        "yes, where vLLM shows how they lie (tested with other numbers of heads)",
    ),
    Entry(
        "blocks that have gaps, or differ from layer to layer where vLLM does not show how they lie",
        "no",
        "odd_blocks",
        "choose another backend with --attention-backend, or another --block-size",
    ),
    Entry(
        "block hashes of more tokens than a chunk",
        "no",
        "coarse_hashes",
        "set kvpool.chunk_tokens to a multiple of the tokens of a hash",
    ),
    Entry(
        "speculative decoding with a draft model in the same group", "its layers are stored with the others; not tested"
    ),
    Entry("chunked prefill, preemption, abort", "yes"),
    Entry("CUDA graphs", "yes; `kvpool.load: sync` asks vLLM for piecewise graphs"),
    Entry("V2 model runner, asynchronous scheduling", "yes; `kvpool.load: sync` becomes `async` there"),
    Entry("prefix caching of vLLM's own", "yes, blocks that it holds are not loaded again"),
    Entry(
        "retention, hints, announcements",
        "yes, in `kv_transfer_params` and `kv_hints` ([Retention and hints](engines/vllm.md#retention-and-hints))",
    ),
    Entry("KV events of the pool in vLLM's stream", "yes, `kvpool.events`"),
    Entry("metrics", "counters for Prometheus and in vLLM's log, hits by tier ([Metrics](engines/vllm.md#metrics))"),
    Entry(
        "`reset_prefix_cache(reset_connector=True)`",
        "this engine finds nothing stored before; with `kvpool.reset: node` the model's chunks are dropped for all",
    ),
    Entry(
        "sleep mode, weights that change in place",
        "yes, sleep from vLLM 0.33 on ([Sleep and training](engines/vllm.md#sleep-and-training))",
    ),
    Entry("shares chunks with other kinds of engine", "no: blocks are opaque"),
)
# What is counted where the table has no row for it.
OTHER = "other"
REMEDIES = {entry.code: entry.remedy for entry in TABLE if entry.code}


class Unserved(LayoutMismatch):
    """An engine that is not served. `code` is the table's."""

    def __init__(self, code: str, cause: str, remedy: str = "") -> None:
        """`remedy` replaces the table's, where more is known of this engine."""
        super().__init__(f"{cause}: {remedy or REMEDIES[code]}")
        self.code = code


def code_of(error: Exception) -> str:
    """The code under which an error that keeps an engine from its pool is counted."""
    return error.code if isinstance(error, Unserved) else OTHER


def support_table() -> str:
    """The table as the page has it: what is served, and below it what is not."""
    served = [f"| {entry.feature} | {entry.text} |" for entry in TABLE if not entry.code]
    refused = [f"| {entry.feature} | `{entry.code}` | {entry.remedy} |" for entry in TABLE if entry.code]
    head = ["", "| not served | counted as | what helps |", "|---|---|---|"]
    return "\n".join(["| served | |", "|---|---|", *served, *head, *refused])


def main() -> None:
    """Write the table into the named page."""
    page = Path(sys.argv[1])
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{support_table()}\n{END}{after}")


if __name__ == "__main__":
    main()
