"""Checks for a missing or partial installation, and for the rights to complete it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvplace.doctor.admission import POLICIES, WEBHOOKS
from kvplace.doctor.api_server import KINDS
from kvplace.doctor.finding import Finding, wrong
from kvplace.doctor.installation import SERVE, Installation, items_at

INSTALLED_RESOURCES: Mapping[str, str] = {
    "customresourcedefinitions": "apiextensions.k8s.io",
    "clusterroles": "rbac.authorization.k8s.io",
    "mutatingwebhookconfigurations": "admissionregistration.k8s.io",
    "validatingadmissionpolicies": "admissionregistration.k8s.io",
    "namespaces": "",
}
"""Resources that only a cluster administrator may create, with their API groups."""


def parts_of(found: Installation) -> Mapping[str, bool]:
    """Return for each part of an installation whether it exists."""
    webhooks = {
        webhook.get("name")
        for resource in WEBHOOKS
        for one in found.of(resource)
        for webhook in items_at(one, "webhooks")
    }
    return {
        "kinds": any(found.named("customresourcedefinitions", name) for name in KINDS),
        "policies": any(found.named("validatingadmissionpolicies", name) for name in POLICIES),
        "serve": bool(found.component("deployments", SERVE)),
        "webhooks": any(name in webhooks for names in WEBHOOKS.values() for name in names),
    }


def is_absent(found: Installation) -> bool:
    """Whether nothing of kvplace exists; resources that may not be read count as existing."""
    return not any(parts_of(found).values()) and not found.denied.keys() & NEEDED


NEEDED = ("customresourcedefinitions", "validatingadmissionpolicies", "deployments", *WEBHOOKS)
"""The resources that must have been read to know the parts."""


def check_parts(found: Installation) -> Iterator[Finding]:
    """Check that all parts are there; where one is missing, also that the caller may install it."""
    parts = parts_of(found)
    missing = [name for name, is_there in parts.items() if not is_there]
    if not missing:
        return
    there = [name for name, is_there in parts.items() if is_there]
    if there:
        yield wrong(
            "kvplace",
            f"only a part is installed: {' and '.join(there)}, without {' and '.join(missing)}",
            "apply your folder again and read the errors of kubectl: kubectl apply --server-side -k FOLDER",
        )
    else:
        yield wrong(
            "kvplace",
            "it is not installed in this cluster",
            'see "Apply" in Install kvplace: kubectl apply --server-side -k FOLDER',
        )
    if found.own_denials:
        yield wrong(
            "your rights",
            f"you may not create {', '.join(found.own_denials)}, which an installation needs",
            "ask a person with the role cluster-admin to apply it; only the installation needs these rights",
        )
