"""Ranges of numbers on the command line, without NaN: no comparison keeps it out of one."""

from __future__ import annotations

import math
from typing import Any

import click


class FloatRange(click.FloatRange):
    """A number from the least to the most."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a number; raises BadParameter for one that is not in the range."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{number} is not in the range {self._describe_range()}", param, ctx)
        return number
