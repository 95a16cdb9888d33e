"""A request's demand on its node besides cores, in the words of a pod's spec; for a live cluster only."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from kvplace.documents.model import Document, Text


class _Camel(Document):
    model_config = ConfigDict(alias_generator=to_camel)


class TolerationKeys(_Camel):
    """A taint that does not keep the VM away."""

    key: Text | None = None
    """Empty for all keys."""
    operator: Literal["Exists", "Equal"] | None = None
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Empty for all effects."""


class Expression(_Camel):
    """One condition on a label."""

    key: Text
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    values: tuple[str, ...] | None = None


class NodeTerm(_Camel):
    """Conditions that must all hold."""

    match_expressions: tuple[Expression, ...] | None = None
    match_fields: tuple[Expression, ...] | None = None


class NodeTerms(_Camel):
    """Terms; one of them must select the node."""

    node_selector_terms: Annotated[tuple[NodeTerm, ...], Field(min_length=1)]


class NodeAffinityKeys(_Camel):
    """The demand on the node; preferences do not matter to a plan."""

    required: NodeTerms = Field(alias="requiredDuringSchedulingIgnoredDuringExecution")


class AffinityKeys(_Camel):
    """The part of a pod's affinity that is about nodes; affinity to pods is not foretold."""

    node_affinity: NodeAffinityKeys


NodeSelector: TypeAlias = dict[str, str]
