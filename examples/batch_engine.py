"""Chats in batches of four, with a pool behind their engine: the next turn of each begins where the pool's KV ends.

    kvpoold &
    python -m examples.batch_engine     # each turn reuses what the turns before have stored
    python -m examples.batch_engine     # another process: it reuses the first one's first turns too

The model is that of examples/engine, whose bits depend on a token's position alone: the answers are the same with any reuse,
with a daemon that is killed meanwhile, and without one. The engine has blocks of its own and keeps nothing from turn to turn.
One thread.
"""

import click
import torch

import kvpool_client as kv
from examples.engine.attention import TILE, Span
from examples.engine.model import SMALL, Model
from kvpool.socket_path import find_socket
from kvpool_client.torch import PagedPrefixCache, Prompt, layout_of

BLOCKS, CHUNK_TOKENS = 256, 32
CHATS, TURNS, INSTRUCTIONS, QUESTION_TOKENS, ANSWER_TOKENS = 4, 5, 150, 40, 8


class Engine:
    """A model, its paged KV, and the pool behind it."""

    def __init__(self, socket: str) -> None:
        self.model = Model(SMALL, seed=1)
        shape = (BLOCKS, 2, TILE, SMALL.kv_heads, SMALL.head_dim)
        self.pages = [torch.zeros(shape) for _ in range(SMALL.layers)]
        layout = layout_of(self.pages, chunk_tokens=CHUNK_TOKENS)
        self.pool = kv.connect(socket, model="batch-engine", revision="1", layout=layout)
        self.prefix = PagedPrefixCache(self.pool, self.pages, block_tokens=TILE, form="block_first")
        self.reused: list[int] = []

    def prefill(self, prompts: list[list[int]], tables: list[torch.Tensor]) -> torch.Tensor:
        """Logits [prompts, vocabulary] of each prompt's last token; computes what the pool has not, and stores it there."""

        def forward(starts: list[int]) -> torch.Tensor:
            self.reused = starts
            batch = zip(prompts, starts, tables, strict=True)
            spans = [Span(tokens[start:], start, table) for tokens, start, table in batch]
            logits: torch.Tensor = self.model(spans, self.pages)
            return logits

        asked = [Prompt(tokens, table) for tokens, table in zip(prompts, tables, strict=True)]
        return self.prefix.prefill(asked, self.model.layers, forward)

    def answer(self, prompts: list[list[int]], count: int) -> tuple[list[list[int]], torch.Tensor]:
        """`count` greedy tokens for each prompt, and the logits of the first ones."""
        free, tables = torch.randperm(BLOCKS), []
        for tokens in prompts:
            needed = -(-(len(tokens) + count) // TILE)
            tables.append(free[:needed])
            free = free[needed:]
        logits = first = self.prefill(prompts, tables)
        answers: list[list[int]] = [[] for _ in prompts]
        for number in range(count):
            for answer, row in zip(answers, logits, strict=True):
                answer.append(int(row.argmax()))
            spans = [
                Span(answer[-1:], len(tokens) + number, table)
                for answer, tokens, table in zip(answers, prompts, tables, strict=True)
            ]
            logits = self.model(spans, self.pages)
        return answers, first


def chats(seed: int) -> tuple[list[list[int]], torch.Tensor]:
    """The instructions that begin each chat, and questions [turns, chats, tokens]."""
    random = torch.Generator().manual_seed(seed)
    instructions = torch.randint(SMALL.vocabulary, (INSTRUCTIONS,), generator=random).tolist()
    questions = torch.randint(SMALL.vocabulary, (TURNS, CHATS, QUESTION_TOKENS), generator=random)
    return [list(instructions) for _ in range(CHATS)], questions


@click.command()
@click.option("--socket", default=find_socket, help="The daemon's socket (default: as kvpoolctl finds it).")
def main(socket: str) -> None:
    """Four chats in one batch, with a pool behind their engine."""
    engine = Engine(socket)
    prompts, questions = chats(seed=2)
    for turn in questions.tolist():
        for prompt, question in zip(prompts, turn, strict=True):
            prompt += question
        answers, _ = engine.answer(prompts, ANSWER_TOKENS)
        print(f"{sum(engine.reused)} of {sum(map(len, prompts))} prompt tokens reused")
        print("tokens:", *(token for answer in answers for token in answer))
        for prompt, answer in zip(prompts, answers, strict=True):
            prompt += answer
    engine.pool.close()


if __name__ == "__main__":
    main()
