"""A choice among words, which suggests the one that was probably meant."""

from __future__ import annotations

from typing import Any

import click

from kvplace.core.near_words import did_you_mean


class Words(click.Choice[str]):
    """One of several words."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Name the words, and the one that is probably meant."""
        known = super().get_invalid_choice_message(value, ctx).removesuffix(".")
        return f"{known}{did_you_mean(value, self.choices)}"
