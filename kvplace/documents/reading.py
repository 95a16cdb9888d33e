"""Texts in YAML or JSON, read within limits.

A text must mean one thing: duplicate keys, tags and numbers that cannot be read are errors. Keys are strings
and so are dates, as in JSON. Anchors, aliases and merge keys are taken as kubectl takes them; the limits
apply to the text with all of them written out. Every error is one sentence that names the document.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from kvplace.core.errors import BadBody
from kvplace.core.strict_json import Json, json_value, kind_of, shown

_MOST_BYTES = 16 * 1024 * 1024
_MOST_DEPTH = 100
_HALF = re.compile(r"[\ud800-\udfff]")
"""Of a character that JSON writes as a pair of escapes."""
_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_STRING = "tag:yaml.org,2002:str"
_MERGES = "tag:yaml.org,2002:merge"


def load_document(path: Path) -> Json:
    """Read a YAML or JSON file, or stdin for `-`, that holds one mapping; raises BadBody that names it."""
    source = str(path)
    return read_document(read_source(source, source_name(source)), source_name(source))


def source_name(source: str) -> str:
    """Name a source in an error: the file, or stdin for `-`."""
    return "<stdin>" if source == "-" else source


def read_stdin(most_bytes: int) -> bytes:
    """Read stdin, and one byte more than allowed where there are more."""
    return sys.stdin.buffer.read(most_bytes + 1)


def read_content(source: str, what: str, most_bytes: int) -> bytes:
    """Read a file, or stdin for `-`; raises BadBody, which calls it `what`, also for a larger one."""
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
    return content


def read_source(source: str, what: str, most_bytes: int = _MOST_BYTES) -> str:
    """Read a file, or stdin for `-`, as text in UTF-8; raises BadBody, which calls it `what`."""
    content = read_content(source, what, most_bytes)
    try:
        return content.decode("utf-8-sig")
    except ValueError:
        utf_16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        fix = "it is UTF-16, as some shells write it" if utf_16 else "it is not text, or in another encoding"
        raise BadBody(f"{what} is not valid UTF-8: {fix}; save it as UTF-8") from None


def read_document(text: str, what: str) -> Json:
    """Read a text that holds one mapping; raises BadBody."""
    found = read_value(text, what)
    if not isinstance(found, dict):
        held = "nothing" if found is None else kind_of(found)
        raise BadBody(f"{what} contains {held}; it must be a mapping of keys to values")
    return found


def read_values(text: str, what: str) -> tuple[object, ...]:
    """Read the documents of a text, which lines of `---` divide in YAML; empty documents are left out."""
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
        value = json_value(text, what=what)
        _check_characters(value, text, what)
        return value
    import yaml

    loader = _json_loader()
    try:
        _check_events(yaml.parse(text, Loader=loader), what)
        reader = loader(text)
        node = reader.get_single_node()
        _prepare_keys(node)
        return None if node is None else reader.construct_document(node)
    except yaml.YAMLError as error:
        raise BadBody(f"{what} is not valid YAML: {_one_line(error)}") from None
    except (ValueError, OverflowError):
        raise BadBody(f"{what} contains a number that cannot be read; quote it if it is a string") from None


def _check_characters(value: object, text: str, what: str) -> None:
    """Raise BadBody for half of a character: YAML does not have it, and no encoding can send it."""
    if not _ESCAPED_HALF.search(text):
        return
    if half := _HALF.search(json.dumps(value, ensure_ascii=False)):
        raise BadBody(f"{what} contains half a character, {ascii(half[0])[1:-1]}; write both halves")


@cache
def _json_loader() -> Any:
    """Make the loader that reads dates as strings, as in JSON."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        yaml_implicit_resolvers: ClassVar = {
            first: [(tag, form) for tag, form in resolvers if tag != "tag:yaml.org,2002:timestamp"]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    return Loader


@dataclass(slots=True)
class _Anchored:
    """The value of an anchor: where it began, and how large and deep it is."""

    began: int
    depth: int
    deepest: int
    size: int | None = None
    """None until its end."""


def _check_events(events: Iterable[Any], what: str) -> None:
    """Raise BadBody for a text that exhausts the stack, or is huge once its aliases are written out.

    Nothing is written out for that: each alias adds the size of its anchor's value.
    """
    import yaml

    size = 0
    anchors: dict[str | None, _Anchored] = {}
    inside: list[_Anchored] = []
    for event in events:
        deepest = depth = len(inside)
        if getattr(event, "tag", None):
            raise BadBody(f"{what} contains the tag {shown(event.tag)}; remove it")
        if isinstance(event, yaml.AliasEvent) and (meant := anchors.get(event.anchor)):
            if meant.size is None:
                raise BadBody(f"{what} contains the alias *{event.anchor} inside of its own anchor")
            size += meant.size
            deepest += meant.deepest - meant.depth
        elif isinstance(event, yaml.CollectionEndEvent):
            ended = inside.pop()
            ended.size = size - ended.began
            deepest = ended.deepest
        elif isinstance(event, yaml.NodeEvent):
            found = _Anchored(size, depth, depth)
            size += 1
            if event.anchor is not None:
                anchors[event.anchor] = found
            if isinstance(event, yaml.CollectionStartEvent):
                inside.append(found)
                deepest = depth + 1
            else:
                size += len(getattr(event, "value", ""))
                found.size = size - found.began
        if inside:
            inside[-1].deepest = max(inside[-1].deepest, deepest)
        if deepest > _MOST_DEPTH:
            raise BadBody(f"{what} is nested more than {_MOST_DEPTH} levels deep")
        if size > _MOST_BYTES:
            raise BadBody(f"{what} is larger than {_MOST_BYTES} bytes once its aliases are written out")


def _prepare_keys(root: Any) -> None:
    """Make every key a string, as in JSON, but `<<` that merges; raises a YAML error for a duplicate key."""
    import yaml

    inside, known = [root], set()
    while inside:
        node = inside.pop()
        if node in known:
            continue
        known.add(node)
        if isinstance(node, yaml.SequenceNode):
            inside += node.value
        elif isinstance(node, yaml.MappingNode):
            seen = set()
            for number, (key, value) in enumerate(node.value):
                inside.append(value)
                if not isinstance(key, yaml.ScalarNode):
                    continue
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"duplicate key {shown(key.value)}", problem_mark=key.start_mark
                    )
                seen.add(key.value)
                if key.tag != _MERGES:
                    # An alias as key is the very node that is a value elsewhere.
                    node.value[number] = (
                        yaml.ScalarNode(_STRING, key.value, key.start_mark, key.end_mark),
                        value,
                    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).replace(' in "<unicode string>",', " at").split())[:300]


def read_manifests(source: str) -> tuple[tuple[str, Json], ...]:
    """Read the objects of a file, or of stdin for `-`, in their order; each with its place for errors.

    A List counts as the objects in it. Raises BadBody for a document that is not a mapping.
    """
    what = source_name(source)
    return manifests_in(read_source(source, what), what)


def manifests_in(text: str, what: str) -> tuple[tuple[str, Json], ...]:
    """Read the objects of a text; errors and places call it `what`."""
    found = read_values(text, what)
    several = len(found) > 1
    return tuple(
        manifest
        for number, value in enumerate(found, 1)
        for manifest in _objects_of(value, f"{what}: document {number}" if several else what)
    )


def _objects_of(value: object, where: str) -> Iterator[tuple[str, Json]]:
    if not isinstance(value, dict):
        raise BadBody(
            f"{where} contains {kind_of(value)}; it must be a Kubernetes object, a mapping with a kind"
        )
    kind, items = value.get("kind"), value.get("items")
    if isinstance(kind, str) and kind.endswith("List") and isinstance(items, list):
        for index, item in enumerate(items):
            yield from _objects_of(item, f"{where}: items[{index}]")
    else:
        yield where, value
