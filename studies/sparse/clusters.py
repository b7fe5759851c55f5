"""Float reference of the summary that stands for a block: seven clusters of its keys, quantised as the native records are.

Channels are scaled by the root of their deviation before clustering: constants in fast rotary pairs turn into a large spread
within the block, and unscaled clusters would follow their phase. All blocks are summarised at once; the order of every step is
fixed. Pure functions of their arguments; any thread.
"""

from dataclasses import dataclass

import numpy as np

from studies.sparse.exact import Floats, Ints

CLUSTERS = 7
ITERATIONS = 3
SCALE_CHANNELS = 32


@dataclass(frozen=True, slots=True)
class Clusters:
    """Summaries of blocks: means [..., C, D], counts and variances [..., C], the variance's profile over channels [..., D]."""

    key_means: Floats
    value_means: Floats
    counts: Floats
    variances: Floats
    profile: Floats


def cluster(keys: Floats, values: Floats, *, is_scaled: bool = True, is_quantised: bool = True) -> Clusters:
    """Summaries of keys and values [..., tokens, D]."""
    scaled = keys / channel_scale(keys) if is_scaled else keys
    return summarised(keys, values, assignment(scaled), CLUSTERS, is_quantised=is_quantised)


def channel_scale(keys: Floats) -> Floats:
    """The root of the deviation of each channel within the block, averaged over rotary pairs (d, d + D/2): [..., 1, D]."""
    variance = keys.var(axis=-2, keepdims=True)
    half = variance.shape[-1] // 2
    paired = (variance[..., :half] + variance[..., half:]) / 2
    scale = np.maximum(np.concatenate([paired, paired], axis=-1), np.float32(1e-12)) ** np.float32(0.25)
    return np.asarray(scale, np.float32)


def assignment(points: Floats) -> Ints:
    """The cluster of each token: k-means from the block's mean and the tokens farthest from what is chosen so far."""
    centres = [points.mean(axis=-2)]
    nearest = np.full(points.shape[:-1], np.inf, dtype=np.float32)
    for _ in range(CLUSTERS - 1):
        distance = ((points - centres[-1][..., None, :]) ** 2).sum(axis=-1)
        nearest = np.minimum(nearest, distance)
        farthest = nearest.argmax(axis=-1)
        centres.append(np.take_along_axis(points, farthest[..., None, None], axis=-2)[..., 0, :])
    centre = np.stack(centres, axis=-2)
    for iteration in range(ITERATIONS):
        scores = points @ centre.swapaxes(-1, -2) - (centre**2).sum(axis=-1)[..., None, :] / 2
        assigned = scores.argmax(axis=-1)
        if iteration < ITERATIONS - 1:
            sums, counts = _sums(points, assigned, CLUSTERS)
            centre = np.where(counts[..., None] > 0, sums / np.maximum(counts, 1)[..., None], centre)
    return np.asarray(assigned)


def _sums(points: Floats, assigned: Ints, clusters: int) -> tuple[Floats, Floats]:
    """Sum and number of the points of each cluster."""
    belongs = (assigned[..., None, :] == np.arange(clusters)[:, None]).astype(np.float32)
    return belongs @ points, belongs.sum(axis=-1)


def summarised(keys: Floats, values: Floats, assigned: Ints, clusters: int, *, is_quantised: bool) -> Clusters:
    """Summaries of the clusters that tokens are assigned to; the variance of each is a number times the block's profile."""
    sums, counts = _sums(keys, assigned, clusters)
    filled = np.maximum(counts, np.float32(1))[..., None]
    means = np.asarray(sums / filled, np.float32)
    square = (keys - np.take_along_axis(means, assigned[..., None], axis=-2)) ** 2
    profile = square.mean(axis=-2)
    profile /= np.maximum(profile.mean(axis=-1, keepdims=True), np.float32(1e-30))
    summed = _sums(square.mean(axis=-1, keepdims=True), assigned, clusters)[0][..., 0]
    variances = np.asarray(summed / filled[..., 0], np.float32)
    value_means = np.asarray(_sums(values, assigned, clusters)[0] / filled, np.float32)
    if is_quantised:
        means, value_means = quantised(means, 127), quantised(value_means, 7)
        profile = quantised(np.sqrt(profile), 255) ** 2
        variances = np.asarray(np.minimum(variances, 65_504).astype(np.float16), np.float32)
    return Clusters(means, value_means, counts, variances, profile)


def quantised(x: Floats, largest: int) -> Floats:
    """What is left of x [..., D] as integers up to `largest`, with a 16-bit scale for every 32 channels."""
    parts = x.reshape(*x.shape[:-1], -1, SCALE_CHANNELS)
    scale = (np.abs(parts).max(axis=-1, keepdims=True) / largest).astype(np.float16).astype(np.float32)
    scale = np.maximum(scale, np.float32(6e-8))
    return np.asarray(np.clip(np.rint(parts / scale), -largest, largest) * scale, np.float32).reshape(x.shape)
