"""Choice of the next token: greedy, or by top-p from a request's own random numbers.

The numbers of a request depend on its seed and on how many tokens it has, not on who else runs: every scheduler chooses alike.
"""

import torch

TEMPERATURE = 0.8


class Sampler:
    """One request's choices, in order. `top_p` 0: greedy."""

    def __init__(self, *, top_p: float, seed: int) -> None:
        self._top_p = top_p
        self._random = torch.Generator().manual_seed(seed)

    def choose(self, logits: torch.Tensor) -> int:
        """The next token after these logits [vocabulary]."""
        if not self._top_p:
            return int(logits.argmax())
        ordered, tokens = (logits / TEMPERATURE).softmax(-1).sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        nucleus = ordered * (before < self._top_p)  # the most likely token is always in it
        return int(tokens[nucleus.multinomial(1, generator=self._random)])
