"""The cluster, and the objects there, that a user chooses with kubectl's flags."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvplace.core.label_terms import LabelTerms


@dataclass(frozen=True, slots=True)
class ClusterFlags:
    """The user's choice; None and empty values stand for kubectl's defaults."""

    kubeconfig: str | None = None
    context: str | None = None
    request_timeout: float | None = None
    """Seconds for one answer of the API server."""
    as_user: str | None = None
    as_groups: tuple[str, ...] = ()
    namespace: str | None = None
    all_namespaces: bool = False
    selector: LabelTerms = ()

    @property
    def are_given(self) -> bool:
        """Whether the user named any of them, and so asked for a cluster."""
        return self != ClusterFlags()


FLAG_NAMES = tuple(field.name for field in fields(ClusterFlags))
"""The arguments of a command that are its flags."""
