"""A whole torch engine in one file, and the few lines that put a kvpool behind it. docs/torch.md walks through it.

    kvpoold &
    python examples/tiny_engine.py     # computes the prompt, stores its KV
    python examples/tiny_engine.py     # another process: takes the KV, computes the rest

A small transformer with random weights from a fixed seed, its KV in blocks of torch tensors, one prompt, greedy tokens.
Not a server: no batches, no scheduler. With no daemon it prints the same tokens, later. One thread.
"""

import time

import click
import torch
from torch import nn

import kvpool_client as kv
from kvpool.socket_path import find_socket
from kvpool_client.torch import PagedPrefixCache, Prompt, layout_of

VOCABULARY, WIDTH, LAYERS, HEADS, HEAD_DIM = 256, 128, 6, 4, 32
BLOCKS, BLOCK_TOKENS, CHUNK_TOKENS = 128, 16, 64


class Layer(nn.Module):
    """Attention over paged KV and a feed-forward; reads and writes `pages` [2, blocks, block_tokens, heads, head_dim]."""

    def __init__(self, pages: torch.Tensor) -> None:
        super().__init__()
        self.pages = pages
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, start: int, block_ids: torch.Tensor) -> torch.Tensor:
        """`x` [tokens, width] are the tokens from position `start` on."""
        end = start + len(x)
        positions = torch.arange(start, end, device=x.device)
        q, k, v = self.qkv(x).view(len(x), 3, HEADS, HEAD_DIM).unbind(1)
        self.pages[:, block_ids[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS] = torch.stack([k, v])
        keys, values = self.pages[:, block_ids].flatten(1, 2)[:, :end].transpose(1, 2)
        mask = torch.arange(end, device=x.device) <= positions[:, None]
        attended = nn.functional.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=mask)
        x = x + self.out(attended.transpose(0, 1).flatten(1))
        out: torch.Tensor = x + self.feed(x)
        return out


class Model(nn.Module):
    """Token ids in, logits of the last token out."""

    def __init__(self, layers: list[torch.Tensor]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(BLOCKS * BLOCK_TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer(pages) for pages in layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: list[int], start: int, block_ids: torch.Tensor) -> torch.Tensor:
        """Computes tokens from position `start` on, and writes their KV into the blocks of `block_ids`."""
        ids = torch.tensor(tokens, device=block_ids.device)
        x = self.tokens(ids) + self.positions(torch.arange(start, start + len(ids), device=ids.device))
        for layer in self.layers:
            x = layer(x, start, block_ids)
        logits: torch.Tensor = self.head(x[-1])
        return logits


class Engine:
    """The model, its paged KV, and the pool behind it."""

    def __init__(self, socket: str, device: str) -> None:
        torch.manual_seed(1)
        shape = (2, BLOCKS, BLOCK_TOKENS, HEADS, HEAD_DIM)
        layers = [torch.zeros(shape, device=device) for _ in range(LAYERS)]
        self.model = Model(layers).to(device).eval()
        self.device = device
        self.reused = 0
        layout = layout_of(layers, chunk_tokens=CHUNK_TOKENS)
        self.pool = kv.connect(socket, model="tiny-engine", revision="1", layout=layout)
        self.prefix = PagedPrefixCache(self.pool, layers, block_tokens=BLOCK_TOKENS)

    def prefill(self, tokens: list[int], block_ids: torch.Tensor) -> torch.Tensor:
        """Logits of the prompt's last token; computes what the pool has not, and stores it there."""

        def forward(starts: list[int]) -> torch.Tensor:
            self.reused = starts[0]
            logits: torch.Tensor = self.model(tokens[starts[0] :], starts[0], block_ids)
            return logits

        return self.prefix.prefill([Prompt(tokens, block_ids)], self.model.layers, forward)

    @torch.no_grad()
    def generate(self, prompt: list[int], count: int) -> tuple[list[int], float]:
        """Greedy tokens, and seconds until the first."""
        needed = -(-(len(prompt) + count) // BLOCK_TOKENS)
        block_ids = torch.randperm(BLOCKS)[:needed].to(self.device)
        began = time.perf_counter()
        logits = self.prefill(prompt, block_ids)
        answer = [int(logits.argmax())]
        first_s = time.perf_counter() - began
        while len(answer) < count:
            logits = self.model(answer[-1:], len(prompt) + len(answer) - 1, block_ids)
            answer.append(int(logits.argmax()))
        return answer, first_s


@click.command()
@click.option("--socket", default=find_socket, help="The daemon's socket (default: as kvpoolctl finds it).")
@click.option(
    "--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True, help="Where to compute."
)
@click.option("--prompt-tokens", default=1500, show_default=True, help="Length of the prompt.")
def main(socket: str, device: str, prompt_tokens: int) -> None:
    """A small torch engine with a pool behind it."""
    prompt = torch.randint(VOCABULARY, (prompt_tokens,), generator=torch.Generator().manual_seed(2)).tolist()
    engine = Engine(socket, device)
    answer, first_s = engine.generate(prompt, 12)
    print(f"first token after {first_s * 1e3:.0f} ms, {engine.reused} of {len(prompt)} prompt tokens reused")
    print("tokens:", *answer)
    engine.pool.close()


if __name__ == "__main__":
    main()
