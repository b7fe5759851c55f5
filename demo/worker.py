"""One engine process of the demonstration: `python -m demo.worker SOCKET PLAN`.

Builds the model and says `ready`; then, for each line `CONVERSATION TURN` on stdin, answers that question of the plan,
the turns of a conversation in order, and says `step` while the prefill is under way and `turn` with the answer. It says
one JSON object a line on stdout. Without a daemon at SOCKET it computes everything: that is the cold case.

One thread of torch, beside the Pool's: two would wait for each other in every kernel, and one busy neighbour on two cores
then costs tenfold (measured: 36 s for a prompt of 3.5 s), which would drown what is to be shown.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

import kvpool_client as kv
from demo.engine import BLOCK_TOKENS, Engine, Shape, build_model
from demo.paged_kv import PagedKV
from demo.plan import Plan
from kvpool.clock import Deadline
from kvpool.states import Level
from kvpool_client.torch import PagedPrefixCache, layout_of

CONNECT_TIMEOUT_S = 10.0
TORCH_THREADS = 1


def main() -> None:
    """Answer what comes over stdin, until it ends."""
    torch.set_num_threads(TORCH_THREADS)
    socket, plan = sys.argv[1], Plan.read(Path(sys.argv[2]))
    shape = Shape(plan.vocabulary)
    model = build_model(shape, plan.seed)
    paged = PagedKV(
        layers=shape.layers,
        blocks=_blocks_needed(plan),
        block_tokens=BLOCK_TOKENS,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        seed=os.getpid(),  # another order of blocks in every process
    )
    layout = layout_of(paged.layers, plan.chunk_tokens)
    with kv.connect(socket, model="demo-llama", revision=str(plan.seed), layout=layout) as pool:
        if Path(socket).exists():
            _wait_connected(pool)
        prefix = PagedPrefixCache(pool, paged.layers, BLOCK_TOKENS)
        engine = Engine(model, paged, prefix, step_tokens=plan.chunk_tokens)
        engine.answer([0] * (2 * plan.chunk_tokens - 1), 2)  # first use of every kernel, outside the measurement
        _say("ready", parameters=sum(weights.numel() for weights in model.parameters()))
        _converse(engine, plan, pool)


def _converse(engine: Engine, plan: Plan, pool: kv.Pool) -> None:
    prompts = [list(conversation.prefix) for conversation in plan.conversations]
    for line in sys.stdin:
        number, turn = (int(word) for word in line.split())
        prompts[number] += plan.conversations[number].questions[turn]
        tiers = tiers_of(pool, prompts[number])
        prompts[number] += _answer(engine, prompts[number], plan.answer_tokens, tiers)


def tiers_of(pool: kv.Pool, prompt: list[int]) -> list[str]:
    """The tiers that the pool's part of a prompt comes from."""
    hit = pool.lookup(pool.keys(prompt))
    return sorted({Level(level).name.lower() for level in hit.tiers.tolist()})


def _answer(engine: Engine, prompt: list[int], count: int, tiers: list[str]) -> list[int]:
    answer = engine.answer(prompt, count, lambda done: _say("step", done=done, total=len(prompt)))
    _say("turn", tiers=tiers, **asdict(answer))
    return answer.tokens


def _blocks_needed(plan: Plan) -> int:
    longest = max(
        len(entry.prefix) + sum(len(question) + plan.answer_tokens for question in entry.questions)
        for entry in plan.conversations
    )
    return longest // BLOCK_TOKENS + 2


def _wait_connected(pool: kv.Pool) -> None:
    deadline = Deadline(CONNECT_TIMEOUT_S)
    while not pool.connected:
        if deadline.has_passed():
            raise SystemExit(f"no daemon answered within {CONNECT_TIMEOUT_S:.0f} s: {pool.stats()['last_error']}")
        time.sleep(0.01)


def _say(event: str, **fields: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
