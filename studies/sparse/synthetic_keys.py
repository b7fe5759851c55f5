"""Structured synthetic keys, queries and values: topics in segments, drift, noise with heavy tails, outlier channels, sinks.

What a generator leaves out cannot fail. Keys of real models have channels that are constant and large; after rotary positions
such a channel is constant only in the slow pairs, and turns several times within a block in the fast ones. Both are here.
Deterministic for its options; any thread.
"""

from dataclasses import dataclass

import numpy as np

from studies.sparse.exact import Floats, Ints, Samples, split_tokens

ROPE_BASE = 1e6
TOPICS = 48
TOPIC_NORM = 4.0
SLOW_SHARE = 0.28
SEGMENT_TOKENS = (40, 500)
DRIFT_NORM = 2.0
NOISE_NORM = 3.2
NOISE_FREEDOM = 4.0
OUTLIER_CHANNELS = 4
OUTLIER_SIZE = 12.0
SINKS = 4
SINK_MASS = (0.15, 0.5)
NEEDLE_MASS = (0.2, 0.9)
NEEDLE_QUERY_NORM = 8.0
CONSTANT_CHANNELS = 2
KINDS = ("needle", "topic", "flat")
QUERY_NORMS = {"needle": 12.0, "topic": 28.0, "flat": 3.0}


@dataclass(frozen=True, slots=True)
class SyntheticOptions:
    """One set of samples. `outliers` are in pairs that are "random" or "fast"; `constants` of that size stand in pairs that are
    `constant_pairs`, "fast" or "slow"."""

    seed: int
    tokens: int = 32_768
    kind: str = "needle"
    outliers: str = "random"
    constants: float = 0.0
    constant_pairs: str = "fast"
    queries: int = 32
    head_dim: int = 128
    kv_heads: int = 2
    group: int = 4


class _Maker:
    """The random choices of one set, in a fixed order."""

    def __init__(self, options: SyntheticOptions) -> None:
        assert options.kind in KINDS, f"one of {KINDS}"
        self.options = options
        self.rng = np.random.default_rng([options.seed, KINDS.index(options.kind), 29])
        self.half = options.head_dim // 2
        slow_pairs = np.arange(self.half - round(self.half * SLOW_SHARE), self.half)
        self.slow = np.concatenate([slow_pairs, slow_pairs + self.half])

    def directions(self, count: int, norm: float, *, is_slow: bool = True) -> Floats:
        """Random directions of one norm, in the slow pairs or everywhere."""
        made = np.zeros((count, self.options.head_dim), np.float32)
        where = self.slow if is_slow else np.arange(self.options.head_dim)
        part = self.rng.standard_normal((count, len(where)))
        made[:, where] = norm * part / np.linalg.norm(part, axis=1, keepdims=True)
        return made

    def noise(self, count: int, norm: float) -> Floats:
        """Directions whose norms have a heavy tail."""
        tails = np.sqrt(NOISE_FREEDOM / self.rng.chisquare(NOISE_FREEDOM, count))
        return (self.directions(count, norm, is_slow=False) * tails[:, None]).astype(np.float32)

    def channels(self, pairs: str, count: int) -> Ints:
        """Channels in rotary pairs of a kind, one of each pair."""
        first, last = {"fast": (0, self.half // 4), "slow": (self.half - self.half // 4, self.half)}.get(
            pairs, (0, self.half)
        )
        chosen = self.rng.choice(np.arange(first, last), count, replace=False)
        return np.asarray(chosen + self.half * self.rng.integers(0, 2, count))

    def segments(self) -> Ints:
        """The topic of each token."""
        topics = np.empty(self.options.tokens, np.int64)
        start = 0
        while start < len(topics):
            length = int(self.rng.integers(SEGMENT_TOKENS[0], SEGMENT_TOKENS[1] + 1))
            topics[start : start + length] = self.rng.integers(TOPICS)
            start += length
        return topics

    def drift(self) -> Floats:
        """A smooth path through the slow pairs, of the norm of DRIFT_NORM at most."""
        knots = self.directions(9, DRIFT_NORM)
        place = np.linspace(0, 8, self.options.tokens)
        low = np.minimum(place.astype(np.int64), 7)
        part = (place - low)[:, None].astype(np.float32)
        return np.asarray(knots[low] * (1 - part) + knots[low + 1] * part)


def turned(x: Floats, positions: Ints) -> Floats:
    """Rotary positions on x [..., n, D], pairs (d, d + D/2)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * ROPE_BASE ** (-np.arange(half) / half)
    cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)


def synthetic_samples(options: SyntheticOptions) -> Samples:
    """Keys, values and queries of the options."""
    maker = _Maker(options)
    heads = [_kv_head(maker) for _ in range(options.kv_heads)]
    needles = _needle_places(maker)
    keys, values, queries = [], [], []
    for plain_keys, head_values, plain_queries, sink in heads:
        head_keys = turned(plain_keys, np.arange(options.tokens))
        head_queries = turned(plain_queries.transpose(1, 0, 2), options.tokens + np.arange(options.queries)).transpose(
            1, 0, 2
        )
        _place_sinks(maker, head_keys, head_queries, sink)
        if options.kind == "needle":
            _place_needles(maker, head_keys, head_queries, needles)
        keys.append(head_keys)
        values.append(head_values)
        queries.append(head_queries)
    return Samples(
        keys=np.stack(keys),
        values=np.stack(values),
        queries=np.concatenate(queries, axis=1),
        visible=np.full(options.queries, options.tokens),
        needles=needles if options.kind == "needle" else np.full(options.queries, -1),
    )


def _kv_head(maker: _Maker) -> tuple[Floats, Floats, Floats, Floats]:
    """Keys [n, D], values [n, D] and queries [queries, group, D] of one KV head before RoPE, and the direction of its sinks."""
    options, rng = maker.options, maker.rng
    topics = maker.directions(TOPICS, TOPIC_NORM)
    of_token = maker.segments()
    keys = topics[of_token] + maker.drift() + maker.noise(options.tokens, NOISE_NORM)
    signs = rng.choice([-1.0, 1.0], OUTLIER_CHANNELS)
    outliers = maker.channels(options.outliers, OUTLIER_CHANNELS)
    keys[:, outliers] += (OUTLIER_SIZE * signs).astype(np.float32)
    topic_values = maker.directions(TOPICS, 4.0, is_slow=False)
    values = topic_values[of_token] + rng.standard_normal(keys.shape).astype(np.float32) * np.float32(0.5)
    sink = maker.directions(1, 1.0)[0]
    norm = QUERY_NORMS[options.kind]
    count = options.queries * options.group
    mix = rng.dirichlet(np.full(3, 0.4), count)[..., None]
    wanted = (topics[rng.integers(0, TOPICS, (count, 3))] / TOPIC_NORM * mix).sum(axis=1)
    queries = norm * wanted / np.linalg.norm(wanted, axis=1, keepdims=True) + maker.noise(count, norm / 6)
    queries += 4.0 * sink
    queries[:, outliers] *= 0.5
    if options.constants:
        channels = maker.channels(options.constant_pairs, CONSTANT_CHANNELS)
        keys[:, channels] = options.constants
        # How much a head listens to the constants: from hardly to far too much.
        listens = np.exp(rng.uniform(np.log(0.01), np.log(1.0), options.group))
        queries = queries.reshape(options.queries, options.group, -1)
        queries[..., channels] = listens[:, None] * rng.normal(1.0, 0.2, (*queries.shape[:2], CONSTANT_CHANNELS))
    shaped = queries.reshape(options.queries, options.group, -1).astype(np.float32)
    return keys.astype(np.float32), values.astype(np.float32), shaped, sink


def _needle_places(maker: _Maker) -> Ints:
    """One token of the middle for each query, none twice."""
    middle = split_tokens(maker.options.tokens).middle
    return np.sort(maker.rng.choice(np.arange(middle.start, middle.stop), maker.options.queries, replace=False))


def _logit_of(mass: float, others: Floats) -> Floats:
    """The logit of a token that has that share of the attention beside others with that log-sum-exp."""
    return np.asarray(others + np.log(mass / (1 - mass)), dtype=np.float32)


def _log_sums(keys: Floats, queries: Floats) -> Floats:
    logits = queries.reshape(-1, queries.shape[-1]) @ keys.T * np.float32(queries.shape[-1] ** -0.5)
    top = logits.max(axis=1)
    return np.asarray((np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top).reshape(queries.shape[:2]))


def _place_sinks(maker: _Maker, keys: Floats, queries: Floats, sink: Floats) -> None:
    """The first tokens answer to what all queries have in common, with a share of the attention that varies by head."""
    mass = float(maker.rng.uniform(*SINK_MASS))
    wanted = _logit_of(mass, _log_sums(keys[SINKS:], queries)).mean() - np.float32(np.log(SINKS))
    direction = turned(np.broadcast_to(sink, (SINKS, len(sink))), np.arange(SINKS))
    flat = queries.reshape(-1, queries.shape[-1])
    for index in range(SINKS):
        # What the token has besides would scatter over the queries.
        gain = float((flat @ direction[index]).mean()) * len(sink) ** -0.5
        keys[index] = direction[index] * (wanted / max(gain, 1e-3))


def _place_needles(maker: _Maker, keys: Floats, queries: Floats, needles: Ints) -> None:
    """Half the heads of the group look for the query's own token; its key has a direction that no other has."""
    looking = queries.shape[1] // 2
    directions = maker.directions(len(needles), 1.0)
    mass = maker.rng.uniform(*NEEDLE_MASS, len(needles))
    positions = maker.options.tokens + np.arange(len(needles))
    queries[:, :looking] += NEEDLE_QUERY_NORM * turned(directions, positions)[:, None]
    others = _log_sums(keys, queries)[:, :looking].mean(axis=1)
    scale = float(keys.shape[-1] ** -0.5)
    for index, place in enumerate(needles):
        direction = turned(directions[index : index + 1], needles[index : index + 1])[0]
        query = queries[index, :looking].mean(axis=0)
        missing = float(_logit_of(mass[index], others[index])) - float(query @ keys[place]) * scale
        keys[place] += direction * (missing / max(float(query @ direction) * scale, 1e-2))
