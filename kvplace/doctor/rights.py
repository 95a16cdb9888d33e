"""Checks of the programs' rights: a program without a right fails only when it needs it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvplace.doctor.finding import Finding, some, wrong
from kvplace.doctor.installation import Installation


@dataclass(frozen=True, slots=True)
class Right:
    """One verb on one resource of the cluster."""

    verb: str
    resource: str
    group: str = ""
    subresource: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{'/' + self.subresource if self.subresource else ''}"


_OURS = "kvplace.io"
RIGHTS: dict[str, tuple[Right, ...]] = {
    "serve": (
        *(Right(verb, "pods") for verb in ("get", "list", "watch", "patch")),
        Right("create", "pods", subresource="binding"),
        *(Right(verb, "nodes") for verb in ("list", "watch", "patch")),
        *(
            Right(verb, "nodeledgers", _OURS)
            for verb in ("get", "list", "watch", "create", "update", "patch", "delete")
        ),
        *(Right(verb, "nodetopologies", _OURS) for verb in ("list", "watch")),
        *(Right(verb, "virtualmachineinstances", "kubevirt.io") for verb in ("get", "list", "watch")),
        Right("create", "events", "events.k8s.io"),
    ),
    "agent": (
        *(Right(verb, "pods") for verb in ("list", "watch")),
        Right("patch", "pods", subresource="status"),
        *(Right(verb, "nodes") for verb in ("list", "watch", "patch")),
        *(Right(verb, "nodetopologies", _OURS) for verb in ("list", "watch", "create", "patch")),
        Right("patch", "nodetopologies", _OURS, "status"),
        *(Right(verb, "nodeledgers", _OURS) for verb in ("list", "watch")),
    ),
}
"""Those without which something stops; manifests/ has them all."""


def check_rights(found: Installation) -> Iterator[Finding]:
    """Check that the service accounts of our programs have their rights."""
    for identity, missing in found.rights.items():
        if missing:
            yield wrong(
                identity,
                f"it lacks the rights to {some(missing, 6)}",
                "apply the folder of your installation again: kubectl apply --server-side -k FOLDER",
            )
