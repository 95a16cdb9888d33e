"""The conditions on labels that objects carry as `matchExpressions`, and how core gets them."""

from __future__ import annotations

import msgspec

from kvplace.core.label_terms import LabelTerm, Operator

_OPERATORS = {
    "In": Operator.IN,
    "NotIn": Operator.NOT_IN,
    "Exists": Operator.EXISTS,
    "DoesNotExist": Operator.ABSENT,
    "Gt": Operator.GREATER,
    "Lt": Operator.LESS,
}


class MatchExpression(msgspec.Struct, frozen=True, gc=False):
    """An entry of `matchExpressions`, or of `matchFields`."""

    key: str = ""
    operator: str = ""
    values: tuple[str, ...] | None = None

    @property
    def term(self) -> LabelTerm | None:
        """The condition; None where it is unknown the operator, and nothing meets it."""
        operator = _OPERATORS.get(self.operator)
        return None if operator is None else LabelTerm(self.key, operator, self.values or ())
