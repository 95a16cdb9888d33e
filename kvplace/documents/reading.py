"""Documents that people write for the offline commands, in YAML or JSON, and how they are read.

Whatever is wrong in one becomes one sentence that names the path of the key, what it holds and what it may
hold. Unknown keys are refused: a misspelt key would be a wish that nobody heard.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from kvplace.core.errors import BadBody
from kvplace.core.request import Request
from kvplace.core.request_json import request_of
from kvplace.core.strict_json import json_object, kind_of, known_keys, shown

_MOST_BYTES = 16 * 1024 * 1024
_MOST_DEPTH = 100
_MOST_TEXT = 256


@dataclass(frozen=True, slots=True)
class Part:
    """One object inside a document, with the path of keys that leads to it."""

    where: str
    """For instance `nodes[2].running[0]`; empty at the top."""
    keys: Mapping[str, Any]

    def path(self, key: str) -> str:
        """Give the path of a key, as a sentence names it."""
        return f"{self.where}.{key}" if self.where else key

    def bad(self, key: str, mend: str) -> BadBody:
        """Make the error that says what a key holds and what is wrong with it."""
        return BadBody(f"{self.path(key)} is {shown(self.keys.get(key))}; {mend}")

    def only(self, *known: str) -> None:
        """Refuse every other key, with the one that is probably meant."""
        try:
            known_keys(self.keys, known)
        except BadBody as error:
            raise BadBody(f"{self.where or 'the document'}: the key {error}") from None

    def text(self, key: str, default: str | None = None) -> str:
        """Read a text of one line; it must be there unless it has a default."""
        if key not in self.keys and default is None:
            raise BadBody(f"{self.path(key)} is missing; it must be a text")
        value = self.keys.get(key, default)
        if not isinstance(value, str) or not value.isprintable() or len(value) > _MOST_TEXT:
            raise self.bad(key, f"it must be a text of one line, at most {_MOST_TEXT} characters")
        return value

    def word(self, key: str, words: tuple[str, ...], default: str) -> str:
        """Read one of a few words."""
        value = self.keys.get(key, default)
        if value not in words:
            raise self.bad(key, f"it must be one of {', '.join(words)}")
        return str(value)

    def count(self, key: str, least: int, most: int, default: int) -> int:
        """Read a whole number between two bounds, both included."""
        value = self.keys.get(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.bad(key, f"it must be a whole number from {least} to {most}")
        return value

    def number(self, key: str, least: float, most: float, default: float) -> float:
        """Read a number between two bounds, both included."""
        value = self.keys.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.bad(key, f"it must be a number from {least:g} to {most:g}")
        return float(value)

    def part(self, key: str) -> Part:
        """Read an object; an empty one when the key is missing."""
        value = self.keys.get(key, {})
        if not isinstance(value, Mapping):
            raise self.bad(key, "it must be an object of keys and values")
        return Part(self.path(key), value)

    def parts(self, key: str, most: int) -> tuple[Part, ...]:
        """Read a list of objects; an empty one when the key is missing."""
        value = self.keys.get(key, [])
        if not isinstance(value, list):
            raise self.bad(key, "it must be a list of objects")
        if len(value) > most:
            raise BadBody(f"{self.path(key)} has {len(value)} entries; at most {most} are read")
        found = []
        for number, entry in enumerate(value):
            where = f"{self.path(key)}[{number}]"
            if not isinstance(entry, Mapping):
                raise BadBody(f"{where} is {shown(entry)}; it must be an object of keys and values")
            found.append(Part(where, entry))
        return tuple(found)

    def request(self, *also: str) -> Request:
        """Read the object as one VM's request; `also` are the keys beside it."""
        try:
            return request_of(self.keys, also=also)
        except BadBody as error:
            raise BadBody(f"{self.where}: {error}") from None


def load_document(path: Path) -> Part:
    """Read a YAML or JSON file that holds one object; raises BadBody that names the file."""
    return read_document(read_text(str(path.absolute()), str(path)), str(path))


def read_text(source: str, what: str, most_bytes: int = _MOST_BYTES) -> str:
    """Read a file, or stdin for `-`, as text in UTF-8; raises BadBody, which calls it `what`."""
    try:
        if source == "-":
            content = sys.stdin.buffer.read(most_bytes + 1)
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
        raise BadBody(f"{what} is no text in UTF-8") from None


def read_document(text: str, what: str) -> Part:
    """Read a text in YAML, or in JSON where it begins with a brace, that holds one object.

    All keys are texts, and so are dates, as in JSON.
    """
    if text.lstrip()[:1] == "{":
        return Part("", json_object(text, what=what))
    import yaml

    loader = _json_loader()
    try:
        _check_events(yaml.parse(text, Loader=loader), what)
        node = yaml.compose(text, Loader=loader)
        _check_keys(node)
        found = yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise BadBody(f"{what} is no YAML: {_one_line(error)}") from None
    except (ValueError, OverflowError):
        raise BadBody(f"{what} holds a number that cannot be read; quote it if it is a text") from None
    if not isinstance(found, dict):
        held = "nothing" if found is None else kind_of(found)
        raise BadBody(f"{what} holds {held}; it must hold an object of keys and values")
    return Part("", found)


@cache
def _json_loader() -> Any:
    """Make the loader that knows no other values than JSON: keys and dates are texts."""
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
    """Refuse what would make the reader fall over, or a small text unfold into a huge document."""
    import yaml

    depth = 0
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MOST_DEPTH:
            raise BadBody(f"{what} nests more than {_MOST_DEPTH} levels deep")
        if isinstance(event, yaml.AliasEvent):
            raise BadBody(f"{what} refers back with *{event.anchor}; write out what is meant")
        if getattr(event, "tag", None):
            raise BadBody(f"{what} has the tag {shown(event.tag)}; leave it out")


def _check_keys(node: Any) -> None:
    """Refuse a key that stands twice in one object: which of them counts would be the reader's taste."""
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
                        problem=f"the key {shown(key.value)} stands in it twice", problem_mark=key.start_mark
                    )
                seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
