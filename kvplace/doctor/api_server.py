"""The API server and our kinds in it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvplace.core.node_topology import VERSION
from kvplace.doctor.finding import Finding, warning, wrong
from kvplace.doctor.installation import Installation, condition, items_at
from kvplace.kube.api_errors import OWNERSHIP_RULE

KINDS = ("nodeledgers.kvplace.io", "nodetopologies.kvplace.io")
OLDEST = (1, 31)
"""The first release with what our policies and CRDs need."""
_APPLY = "apply the folder of your installation again: kubectl apply --server-side -k FOLDER"


def is_too_old(found: Installation) -> bool | None:
    """Whether the API server lacks kinds that kvplace needs; None where its release cannot be read."""
    match = re.match(r"v?(\d+)\.(\d+)", found.server_version)
    return None if match is None else (int(match[1]), int(match[2])) < OLDEST


def check_version(found: Installation) -> Iterator[Finding]:
    """Check that the API server has what kvplace needs."""
    too_old = is_too_old(found)
    if too_old is None:
        yield warning(
            "API server", f"its version {found.server_version!r} cannot be read", "check it by hand"
        )
    elif too_old:
        oldest = ".".join(map(str, OLDEST))
        yield wrong(
            "API server",
            f"Kubernetes {found.server_version} is too old: without admission policies and CRD rules cores "
            "could be given out twice",
            f"upgrade the cluster to {oldest} or newer",
        )


def check_kinds(found: Installation) -> Iterator[Finding]:
    """Check that both kinds are served in our version, and that the ledger keeps its rule."""
    for name in KINDS:
        about = f"CustomResourceDefinition {name}"
        crd = found.named("customresourcedefinitions", name)
        if crd is None:
            yield wrong(about, "it is not installed", _APPLY)
            continue
        served = {one.get("name"): one for one in items_at(crd, "spec", "versions") if one.get("served")}
        if VERSION not in served:
            yield wrong(
                about,
                f"it serves {', '.join(map(str, served)) or 'no version'}, and kvplace "
                f"{found.client_version} reads {VERSION}",
                "use the kvplace of the cluster's release, or upgrade the installation",
            )
        elif name == KINDS[0] and OWNERSHIP_RULE not in str(served[VERSION].get("schema")):
            yield wrong(
                about, "it lacks the rule that a core is released before it gets another owner", _APPLY
            )
        established = condition(crd, "Established")
        if established.get("status") != "True":
            reason = established.get("message") or "the API server has not accepted it yet"
            yield wrong(about, f"it is not served: {reason}", "run `kubectl describe crd` for it")
