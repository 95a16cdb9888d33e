"""Choices among words, and among commands, which suggest the one that was probably meant."""

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


class Commands(click.Group):
    """A group of commands that suggests the one that was probably meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest a command for a misspelt one, as click does for options."""
        known = self.list_commands(ctx)
        if args[0] not in known:
            ctx.fail(f"no such command {args[0]!r}{did_you_mean(args[0], known)}")
        return super().resolve_command(ctx, args)


def either(words: Sequence[str]) -> str:
    """Write a choice: `a`, `a or b`, `a, b or c`."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
