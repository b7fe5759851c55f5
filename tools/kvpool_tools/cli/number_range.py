"""Number range: an option's number within bounds, which NaN never is, although click lets it through. Immutable."""

import math
from typing import Any

import click


class NumberRange(click.FloatRange):
    """See the module."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or a usage error."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is no number.", param, ctx)
        return number
