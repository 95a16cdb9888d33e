"""Reads JSON strictly and names its values in error messages.

Python's own reader accepts duplicate keys and NaN, and raises errors of its own for documents that are nested
too deeply and numbers that are too long. Here each is refused with one sentence in the terms of JSON. For a
key or value that is not known, the sentence ends with the known one that is most like it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from kvplace.core.errors import BadBody

Json: TypeAlias = dict[str, Any]

_MOST_DIGITS = 1000
_MOST_SHOWN = 80


def json_object(text: str, *, what: str, like: str = "") -> Json:
    """Read one JSON object; raises BadBody, also for a duplicate key. `like` is an example for the error."""
    found = json_value(text, what=what)
    if not isinstance(found, dict):
        example = f" such as {like}" if like else ""
        raise BadBody(f"{what} must be a JSON object{example}, not {kind_of(found)}")
    return found


def unknown_key(document: Mapping[str, Any], known: Iterable[str], at: str = "") -> str:
    """Name the first key that is not known, and the one that is probably meant; empty when all are known.

    A Kubernetes object where another document is expected is called one.
    """
    known = tuple(known)
    for key in document:
        if key not in known:
            kind = document.get("kind")
            if isinstance(kind, str) and "apiVersion" in document and "apiVersion" not in known and not at:
                keys = ", ".join(known)
                what = f"it is a Kubernetes object of kind {shown(kind)}"
                return f"{what}; expected is a document with the keys {keys}"
            hint = did_you_mean(key, known) or f"; known are {', '.join(known)}"
            return f"{at}{shown(key)} is not known{hint}"
    return ""


def known_keys(document: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise BadBody for the first key that is not known, with the one that is probably meant."""
    if sentence := unknown_key(document, known):
        raise BadBody(sentence)


def shown(value: object) -> str:
    """Write a value as it was given, shortened to fit a sentence."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python writes
        return f"a number of {int(value).bit_length()} bits" if isinstance(value, int) else "too large"
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def kind_of(value: object) -> str:
    """Name the JSON type of a value: `a list`."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    match value:
        case str():
            return "a string"
        case Mapping():
            return "an object"
        case list():
            return "a list"
        case int() | float():
            return "a number"
    return "something else"


def json_value(text: str, *, what: str) -> object:
    """Read any JSON value; raises BadBody, also for a duplicate key."""
    text = text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}")
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_int=_whole, parse_constant=_no_number)
    except RecursionError:
        raise BadBody(f"{what} is not valid JSON: it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise BadBody(f"{what} is not valid JSON: {error}") from None
    except ValueError as error:
        raise BadBody(f"{what}: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {shown(key)}")
            seen.add(key)
    return found


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"it contains a number of {len(digits)} digits")
    return int(digits)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


_MOST_COMPARED = 60


def near_word(word: object, known: Iterable[str]) -> str:
    """Return the known word that is most like this one, in any case; empty when none is like it."""
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
