"""The engine of tiny_engine.py over a block pool: several requests, prefix reuse on the device, and the node's pool behind it.

    kvpoold &
    python -m examples.block_engine     # the second question reuses the first one's document
    python -m examples.block_engine     # another process: both come from the node's pool

One document with three questions, and two answers to the last one. Not a server: requests run one after another. With no
daemon it prints the same tokens. One thread.
"""

import click
import torch

import kvpool_client as kv
from examples.tiny_engine import BLOCK_TOKENS, CHUNK_TOKENS, HEAD_DIM, HEADS, LAYERS, VOCABULARY, Model
from kvpool.socket_path import find_socket
from kvpool_blocks import BlockPool
from kvpool_client.torch import gated

ANSWER_TOKENS = 12


class Engine:
    """The model, and the pool of its blocks."""

    def __init__(self, socket: str, device: str, num_blocks: int) -> None:
        torch.manual_seed(1)
        layout = kv.Layout(layers=LAYERS, kv_heads=HEADS, head_dim=HEAD_DIM, dtype="float32", chunk_tokens=CHUNK_TOKENS)
        self.pool = kv.connect(socket, model="block-engine", revision="1", layout=layout)
        self.blocks = BlockPool(num_blocks=num_blocks, tokens_per_block=BLOCK_TOKENS, device=device, pool=self.pool)
        # The model's pages have the plane before the block.
        pages = [self.blocks.buffers(layer).transpose(0, 1) for layer in range(LAYERS)]
        self.model = Model(pages).to(device).eval()
        self.device = device
        self.reused = 0

    def prefill(self, request: str, prompt: list[int]) -> torch.Tensor | None:
        """Logits of the prompt's last token; None where there is no room now."""
        allocation = self.blocks.allocate(request, prompt)
        if allocation is None:
            return None
        block_ids = self.table(request)
        with gated(allocation.load, self.model.layers):
            logits: torch.Tensor = allocation.prefill(lambda start: self.model(prompt[start:], start, block_ids))
        self.reused = allocation.reused_tokens
        self.blocks.computed(request, self.reused, len(prompt))
        return logits

    def decode(self, request: str, token: int) -> torch.Tensor | None:
        """Logits after one more token; None where there is no room now."""
        if not self.blocks.append(request, [token]):
            return None
        last = self.blocks.length(request) - 1
        logits: torch.Tensor = self.model([token], last, self.table(request))
        self.blocks.computed(request, last, last + 1)
        return logits

    def table(self, request: str) -> torch.Tensor:
        """The request's block ids, as the model takes them."""
        return torch.tensor(self.blocks.block_ids(request), device=self.device)

    def answer(self, request: str, logits: torch.Tensor | None, rank: int = 0) -> list[int]:
        """Greedy tokens; the first one is the most likely but `rank`. Fewer where there is no room."""
        tokens: list[int] = []
        while logits is not None and len(tokens) < ANSWER_TOKENS:
            tokens.append(int(logits.topk(rank + 1).indices[-1]))
            rank = 0
            if len(tokens) < ANSWER_TOKENS:
                logits = self.decode(request, tokens[-1])
        return tokens


@click.command()
@click.option("--socket", default=find_socket, help="The daemon's socket (default: as kvpoolctl finds it).")
@click.option(
    "--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True, help="Where to compute."
)
@click.option("--blocks", default=120, show_default=True, help="Blocks of the pool; a request needs 87.")
@torch.no_grad()
def main(socket: str, device: str, blocks: int) -> None:
    """A small torch engine over a block pool."""
    random = torch.Generator().manual_seed(2)
    document = torch.randint(VOCABULARY, (1350,), generator=random).tolist()
    engine = Engine(socket, device, blocks)
    for number in range(3):
        request = f"question {number + 1}"
        prompt = document + torch.randint(VOCABULARY, (20,), generator=random).tolist()
        logits = engine.prefill(request, prompt)
        print(f"{request}: {engine.reused} of {len(prompt)} prompt tokens reused")
        if number == 2 and engine.blocks.fork(request, "again") is not None:
            print("tokens:", *engine.answer("again", logits, rank=1))
            engine.blocks.free("again")
        print("tokens:", *engine.answer(request, logits))
        engine.blocks.free(request)
    engine.blocks.close()
    engine.pool.close()


if __name__ == "__main__":
    main()
