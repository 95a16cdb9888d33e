"""The word that was probably meant by one that is not known, for the end of an error's sentence."""

from __future__ import annotations

from collections.abc import Iterable

_MOST_COMPARED = 60


def near_word(word: object, known: Iterable[str]) -> str:
    """Return the known word that is most like this one, whatever its case; empty when none is like it."""
    import difflib  # seldom needed, and slow to load

    if not isinstance(word, str):
        return ""
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(word[:_MOST_COMPARED].strip().lower(), by_lower, n=1)
    return by_lower[near[0]] if near else ""


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Write `; did you mean 'x'?`, or nothing when no known word is like this one."""
    near = near_word(word, known)
    return f"; did you mean {near!r}?" if near else ""
