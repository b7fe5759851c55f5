"""Training of the small model in about ten minutes on two cores, and the cache of its weights.

Short streams with random gaps in their positions teach the distances of long ones; a few steps of 4096 tokens end it. Weights
are kept as plain arrays, a file for each seed and version: reading them runs no code. Needs torch; main thread only.
"""

import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from studies.sparse.tasks import TASKS, gapped_positions, make_stream
from studies.sparse.tiny_model import Shape, TinyModel

# Part of the cached file's name: weights of another recipe are never read.
VERSION = 1
STEPS = 330
LONG_STEPS = 15
LONG_TOKENS = 4096
STEP_TOKENS = 7168
LENGTHS = (128, 256, 512, 1024)
SPAN_MAX = 34_000
LEARNING_RATE = 2e-3
WARM_UP_STEPS = 15
FILLER_WEIGHT = 0.05

# Called after each step with the number of steps there are and the share of right answers in it.
Progress = Callable[[int, float], None]


def cache_directory() -> Path:
    """Directory of cached weights."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpool"


def weights_path(seed: int) -> Path:
    """The file of a seed's weights."""
    return cache_directory() / f"tiny-model-{VERSION}-{seed}.npz"


def trained_model(seed: int, progress: Progress) -> TinyModel:
    """The model of a seed: read from the cache, or trained and written there."""
    path = weights_path(seed)
    model = TinyModel(Shape(), seed)
    if path.exists():
        with np.load(path) as arrays:
            model.load_state_dict({name: torch.from_numpy(arrays[name]) for name in arrays.files})
        return model
    train(model, seed, progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.npz")
    np.savez(unfinished, **{name: value.numpy() for name, value in model.state_dict().items()})
    unfinished.replace(path)
    return model


def train(model: TinyModel, seed: int, progress: Progress) -> None:
    """Train in place, deterministic for a seed and a number of threads."""
    rng = np.random.default_rng([seed, 17])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    total = STEPS + LONG_STEPS
    for step in range(total):
        warm = min(1.0, (step + 1) / WARM_UP_STEPS)
        rate = LEARNING_RATE * warm * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * step / total)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        length = LONG_TOKENS if step >= STEPS else int(rng.choice(LENGTHS))
        optimizer.zero_grad(set_to_none=True)
        share_right = _learn(model, rng, length)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(total, share_right)


def _learn(model: TinyModel, rng: np.random.Generator, length: int) -> float:
    """Gradients of one step, and the share of right answers."""
    count = max(2, STEP_TOKENS // length)
    streams = [make_stream(rng, TASKS[index % len(TASKS)], length) for index in range(count)]
    tokens = torch.from_numpy(np.stack([stream.tokens for stream in streams]))
    positions = torch.from_numpy(np.stack([gapped_positions(rng, length, SPAN_MAX) for _ in streams]))
    weights = torch.full(tokens.shape, FILLER_WEIGHT)
    for row, stream in enumerate(streams):
        weights[row, torch.from_numpy(stream.asked)] = 1.0
    logits, _ = model(tokens[:, :-1], positions[:, :-1])
    weights = weights[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view_as(weights)
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    is_right = (logits.argmax(-1) == tokens[:, 1:])[weights == 1.0]
    return float(is_right.float().mean())
