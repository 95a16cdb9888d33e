"""Texts in YAML or JSON, read within limits.

A text must mean one thing: duplicate keys, references, tags and numbers that cannot be read are errors. Keys
are strings and so are dates, as in JSON. Every error is one sentence that names the document.
"""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from kvplace.core.errors import BadBody
from kvplace.core.strict_json import Json, json_value, kind_of, shown

_MOST_BYTES = 16 * 1024 * 1024
_MOST_DEPTH = 100


def load_document(path: Path) -> Json:
    """Read a YAML or JSON file, or stdin for `-`, that holds one mapping; raises BadBody that names it."""
    source = str(path)
    return read_document(read_text(source, source_name(source)), source_name(source))


def source_name(source: str) -> str:
    """Name a source in an error: the file, or stdin for `-`."""
    return "<stdin>" if source == "-" else source


def read_stdin(most_bytes: int) -> bytes:
    """Read stdin, and one byte more than the most that are allowed where there are more."""
    return sys.stdin.buffer.read(most_bytes + 1)


def read_text(source: str, what: str, most_bytes: int = _MOST_BYTES) -> str:
    """Read a file, or stdin for `-`, as text in UTF-8; raises BadBody, which calls it `what`."""
    try:
        if source == "-":
            content = read_stdin(most_bytes)
        else:
            with Path(source).open("rb") as file:
                content = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:
        raise BadBody(f"{what} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > most_bytes:
        raise BadBody(f"{what} is larger than {most_bytes} bytes")
    try:
        return content.decode("utf-8-sig")
    except ValueError:
        utf_16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        mend = "it is UTF-16, as some shells write it" if utf_16 else "it is no text, or in another encoding"
        raise BadBody(f"{what} is not valid UTF-8: {mend}; save it as UTF-8") from None


def read_document(text: str, what: str) -> Json:
    """Read a text that holds one mapping; raises BadBody."""
    found = read_value(text, what)
    if not isinstance(found, dict):
        held = "nothing" if found is None else kind_of(found)
        raise BadBody(f"{what} contains {held}; it must be a mapping of keys to values")
    return found


def read_values(text: str, what: str) -> tuple[object, ...]:
    """Read the documents of a text, which lines of `---` divide in YAML; empty ones are left out."""
    if text.lstrip()[:1] in ("{", "["):
        return (read_value(text, what),)
    parts = [part for part in re.split(r"^---(?=\s|$)", text, flags=re.MULTILINE) if part.strip()]
    whats = (
        [what] if len(parts) == 1 else [f"{what}: document {number}" for number in range(1, len(parts) + 1)]
    )
    found = (read_value(part, one) for part, one in zip(parts, whats, strict=True))
    return tuple(value for value in found if value is not None)


def read_value(text: str, what: str) -> object:
    """Read a text in JSON where it begins with a bracket or brace, else in YAML; raises BadBody."""
    if text.lstrip()[:1] in ("{", "["):
        return json_value(text, what=what)
    import yaml

    loader = _json_loader()
    try:
        _check_events(yaml.parse(text, Loader=loader), what)
        reader = loader(text)
        node = reader.get_single_node()
        _check_keys(node)
        return None if node is None else reader.construct_document(node)
    except yaml.YAMLError as error:
        raise BadBody(f"{what} is not valid YAML: {_one_line(error)}") from None
    except (ValueError, OverflowError):
        raise BadBody(f"{what} contains a number that cannot be read; quote it if it is a string") from None


@cache
def _json_loader() -> Any:
    """Make the loader whose values are those of JSON: keys and dates are strings."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        yaml_implicit_resolvers: ClassVar = {
            first: [(tag, form) for tag, form in resolvers if tag != "tag:yaml.org,2002:timestamp"]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    key.tag = "tag:yaml.org,2002:str"
            return super().construct_mapping(node, deep)

    return Loader


def _check_events(events: Iterable[Any], what: str) -> None:
    """Raise BadBody for what exhausts the stack, or expands a small text to a huge document."""
    import yaml

    depth = 0
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MOST_DEPTH:
            raise BadBody(f"{what} is nested more than {_MOST_DEPTH} levels deep")
        if isinstance(event, yaml.AliasEvent):
            raise BadBody(f"{what} contains the alias *{event.anchor}; write the value out")
        if getattr(event, "tag", None):
            raise BadBody(f"{what} contains the tag {shown(event.tag)}; remove it")


def _check_keys(node: Any) -> None:
    """Raise a YAML error for a duplicate key."""
    import yaml

    inside = [node]
    while inside:
        node = inside.pop()
        if isinstance(node, yaml.SequenceNode):
            inside += node.value
        elif isinstance(node, yaml.MappingNode):
            seen = set()
            for key, value in node.value:
                inside.append(value)
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"duplicate key {shown(key.value)}", problem_mark=key.start_mark
                    )
                seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).replace(' in "<unicode string>",', " at").split())[:300]
