"""Label selectors as people write them for kubectl: `app=web,tier!=db,zone in (a,b),gpu,!old,size>8`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from kvplace.core.errors import BadBody

_NAME = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY = rf"(?:[a-z0-9](?:[-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_NAME}"
_TERM = re.compile(
    rf"\s*(?:(?P<absent>!)\s*(?P<gone>{_KEY})"
    rf"|(?P<key>{_KEY})\s*(?:(?P<sign>==|=|!=)\s*(?P<value>{_NAME}|)"
    r"|(?P<order>[<>])\s*(?P<bound>-?[0-9]{1,18})"
    r"|\s(?P<word>in|notin)\s*\((?P<values>[^()]*)\))?)\s*(?:,|$)"
)


class Operator(Enum):
    """The demand of a term on a label."""

    IN = "in"
    NOT_IN = "notin"
    EXISTS = "exists"
    ABSENT = "absent"
    GREATER = ">"
    LESS = "<"


@dataclass(frozen=True, slots=True)
class LabelTerm:
    """One condition on a label; its text is in the syntax of the API server."""

    key: str
    operator: Operator
    values: tuple[str, ...] = ()

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Return whether an object with these labels is selected; no label is `notin` anything."""
        match self.operator:
            case Operator.IN:
                return labels.get(self.key) in self.values
            case Operator.NOT_IN:
                return labels.get(self.key) not in self.values
            case Operator.EXISTS:
                return self.key in labels
            case Operator.ABSENT:
                return self.key not in labels
            case Operator.GREATER | Operator.LESS:
                return self._is_in_order(labels.get(self.key, ""))

    def _is_in_order(self, value: str) -> bool:
        """Compare whole numbers; any other text is neither greater nor less."""
        try:
            (bound,) = map(int, self.values)
            return int(value) > bound if self.operator is Operator.GREATER else int(value) < bound
        except ValueError:
            return False

    def __str__(self) -> str:
        match self.operator:
            case Operator.EXISTS:
                return self.key
            case Operator.ABSENT:
                return f"!{self.key}"
            case Operator.GREATER | Operator.LESS:
                return f"{self.key}{self.operator.value}{','.join(self.values)}"
            case _:
                return f"{self.key} {self.operator.value} ({','.join(self.values)})"


LabelTerms = tuple[LabelTerm, ...]


def read_label_terms(text: str) -> LabelTerms:
    """Read a selector; raises BadBody, which names the place of the fault."""
    terms: list[LabelTerm] = []
    position = 0
    while position < len(text.rstrip()):
        found = _TERM.match(text, position)
        if found is None or found.end() == position:
            raise BadBody(
                f"the selector {text!r} cannot be read at {text[position:][:40]!r}: write it like "
                "'app=web,tier!=db,zone in (a,b),gpu,!old,size>8'"
            )
        terms.append(_term(found))
        position = found.end()
    if text.rstrip().endswith(","):
        raise BadBody(f"the selector {text!r} ends with a comma: remove it or add a term")
    return tuple(terms)


def _term(found: re.Match[str]) -> LabelTerm:
    if found["absent"]:
        return LabelTerm(found["gone"], Operator.ABSENT)
    if found["sign"]:
        operator = Operator.NOT_IN if found["sign"] == "!=" else Operator.IN
        return LabelTerm(found["key"], operator, (found["value"],))
    if found["order"]:
        return LabelTerm(found["key"], Operator(found["order"]), (found["bound"],))
    if found["word"]:
        values = tuple(value.strip() for value in found["values"].split(","))
        return LabelTerm(found["key"], Operator(found["word"]), values)
    return LabelTerm(found["key"], Operator.EXISTS)
