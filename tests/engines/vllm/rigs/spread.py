"""The confidence interval of a median of measurements."""


def median_bounds(values: list[float]) -> tuple[float, float]:
    """Between which values the true median lies, 95 % of the time: order statistics, by the normal approximation."""
    ordered = sorted(values)
    reach = 0.98 * len(ordered) ** 0.5
    low, high = round(len(ordered) / 2 - reach), round(len(ordered) / 2 + reach)
    return ordered[max(low, 0)], ordered[min(high, len(ordered) - 1)]
