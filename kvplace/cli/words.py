"""A choice among words, which suggests the one that was probably meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from kvplace.core.near_words import did_you_mean


class Words(click.Choice[str]):
    """One of several words."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Name the words, and the one that is probably meant."""
        known = super().get_invalid_choice_message(value, ctx).removesuffix(".")
        return f"{known}{did_you_mean(value, self.choices)}"

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        """Name the words in one line."""
        return f"choose {either(self.choices)}"


def either(words: Sequence[str]) -> str:
    """Write a choice: `a`, `a or b`, `a, b or c`."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
