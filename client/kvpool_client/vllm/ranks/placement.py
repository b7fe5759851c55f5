"""Placement of ranks: kvpool serves ranks that share one node's daemon, each with all the tokens of its heads and layers.

Configured placements that cannot be served are refused at the start. Others (Ray places ranks itself) each worker detects from
the first plan that reaches it, which names the scheduler's node: a node is one running kernel, regardless of containers. Reads
one file. Any thread.
"""

import platform
from functools import cache
from pathlib import Path

from kvpool_client.vllm.support import Unserved

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
BOOT_ID_SHOWN = 8
SEVERAL_NODES = "several_nodes"
# What each parallel size spreads over ranks, and the code under which it is counted (see `support`).
SPREAD = {
    "decode_context_parallel_size": ("a sequence's tokens", "context_parallel"),
    "prefill_context_parallel_size": ("a sequence's tokens", "context_parallel"),
}


@cache
def node_name() -> str:
    """This node: its name for people and the id of its running kernel."""
    try:
        boot = BOOT_ID.read_text().strip()[:BOOT_ID_SHOWN]
    except OSError:
        boot = ""
    return f"{platform.node()}/{boot}"


def check_placement(parallel: object) -> None:
    """Raises Unserved, with the ranks and what to change, where ranks cannot be served."""
    ranks = int(getattr(parallel, "tensor_parallel_size", 1))
    for name, (what, code) in SPREAD.items():
        size = int(getattr(parallel, name, 1))
        if size > 1:
            everybody = ranks * (1 if name == "decode_context_parallel_size" else size)
            spread = f"spreads {what} over ranks 0 to {everybody - 1}"
            raise Unserved(code, f"{name} is {size}, which {spread}, expected 1")
    check_nodes(parallel)


def check_nodes(parallel: object) -> None:
    """Raises Unserved, with the ranks and what to change, where a tensor-parallel group or its stages are on several nodes."""
    ranks = int(getattr(parallel, "tensor_parallel_size", 1))
    stages = int(getattr(parallel, "pipeline_parallel_size", 1))
    everybody = ranks * stages
    nodes = int(getattr(parallel, "nnodes_within_dp", getattr(parallel, "nnodes", 1)))
    here = -(-everybody // max(1, nodes))
    if nodes > 1 and here < everybody:
        spread, sizes = "one tensor-parallel group runs", f"--tensor-parallel-size {here}"
        if stages > 1:
            spread = f"{stages} pipeline stages of {ranks} ranks run"
            sizes = f"--tensor-parallel-size and --pipeline-parallel-size of {here} ranks together"
        raise Unserved(
            SEVERAL_NODES,
            f"{spread} on {nodes} nodes: ranks {here} to {everybody - 1} cannot reach the daemon of "
            f"ranks 0 to {here - 1}, expected all on one node",
            f"use {sizes}, and --data-parallel-size for the other nodes",
        )


def fault_of_node(rank: int, *, here: str, scheduler: str) -> str:
    """The reason for which a rank is not served when its scheduler runs on another node; empty on the same node."""
    if not scheduler or scheduler == here:
        return ""
    cause = f"rank {rank} runs on node {here} and its scheduler on {scheduler}, expected one node"
    return str(Unserved(SEVERAL_NODES, cause))
