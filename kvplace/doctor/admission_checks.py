"""The webhooks and policies: without them VMs get no cores, or a client could forge results."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from kvplace.doctor.installation import (
    ADMITTED,
    AGENT,
    APPLY_AGAIN,
    CERTIFICATES,
    Finding,
    Installation,
    object_name,
    some,
    warning,
    wrong,
)
from kvplace.kube.object_client import Document, at, condition, items_at
from kvplace.service.listening import certificate_ends

WEBHOOKS = {
    "mutatingwebhookconfigurations": (
        "vmi.kvplace.io",
        "vmi-edit.kvplace.io",
        "vm-pod.kvplace.io",
        "pod.kvplace.io",
    ),
    "validatingwebhookconfigurations": ("vm.kvplace.io",),
}
LEFT_ALONE = ("kvplace-system", "kube-system")
"""The namespaces that the API server excludes from the webhooks."""
POLICIES = (
    "agent-events.kvplace.io",
    "agent-nodes.kvplace.io",
    "agent-topologies.kvplace.io",
    "binding-results.kvplace.io",
    "kvplace-pod-results",
    "ledger-claims.kvplace.io",
    "ledger-deletion.kvplace.io",
    "misspelt-annotations.kvplace.io",
    "node-annotation.kvplace.io",
    "other-pods.kvplace.io",
)
"""The policies of every installation; tests compare them with the manifests."""
CPU_CLAIMS_POLICY = "resource-claims.kvplace.io"
"""The policy of the component dra-driver-cpu."""
_WARNS = "misspelt-annotations.kvplace.io"
"""The policy that only warns."""
_OF_AGENTS = "agent-"
"""The prefix of the policies that an installation without an agent lacks."""
_KINDS = {
    "mutatingwebhookconfigurations": "MutatingWebhookConfiguration",
    "validatingwebhookconfigurations": "ValidatingWebhookConfiguration",
}
_SOON = timedelta(days=14)
_CERTIFICATES = (
    'see "Certificates" in Install kvplace: cert-manager or kvplace-certificates writes it, or you with '
    "make-certificates; then apply your folder again"
)


def check_webhooks(found: Installation) -> Iterator[Finding]:
    """Check that each webhook is registered once, for an existing Service, with a valid CA."""
    for resource, names in WEBHOOKS.items():
        for name in names:
            registered = [
                (object_name(one, _KINDS[resource]), webhook)
                for one in found.of(resource)
                for webhook in items_at(one, "webhooks")
                if webhook.get("name") == name
            ]
            if not registered:
                yield wrong(
                    f"webhook {name}",
                    "it is not registered: objects that opt in are not admitted by kvplace",
                    APPLY_AGAIN,
                )
            elif len(registered) > 1:
                where = ", ".join(about for about, _ in registered)
                yield wrong(
                    f"webhook {name}",
                    f"it is registered {len(registered)} times ({where}): by two installations",
                    "delete the configurations of the unused installation",
                )
            for about, webhook in registered:
                yield from _of_webhook(found, f"{about}: {name}", webhook)


def _of_webhook(found: Installation, about: str, webhook: Mapping[str, Any]) -> Iterator[Finding]:
    if webhook.get("failurePolicy") != "Fail":
        yield wrong(
            about, "its failurePolicy is not Fail: VMs start without cores while kvplace is down", APPLY_AGAIN
        )
    service = at(webhook, "clientConfig", "service")
    if isinstance(service, Mapping):
        namespace, name = service.get("namespace"), service.get("name")
        if not any(
            one["metadata"].get("namespace") == namespace and one["metadata"]["name"] == name
            for one in found.of("services")
        ):
            yield wrong(about, f"there is no Service {namespace}/{name}", APPLY_AGAIN)
    yield from _of_bundle(about, at(webhook, "clientConfig", "caBundle"), found.now)


def _of_bundle(about: str, bundle: object, now: datetime) -> Iterator[Finding]:
    try:
        pem = base64.b64decode(bundle if isinstance(bundle, str) else "", validate=True)
    except binascii.Error:
        pem = b""
    end = max(certificate_ends(pem), default=None)  # an old CA may stay beside the present one
    if end is None:
        yield wrong(about, "its caBundle has no certificate: the API server cannot call it", _CERTIFICATES)
    elif end <= now:
        yield wrong(about, f"the CA in its caBundle ended on {end:%Y-%m-%d %H:%M} UTC", _CERTIFICATES)
    elif end - now < _SOON:
        yield warning(about, f"the CA in its caBundle ends on {end:%Y-%m-%d %H:%M} UTC", _CERTIFICATES)


def check_admission_answers(found: Installation) -> Iterator[Finding]:
    """Check that the webhook for pods answers: it must have refused the trial pod."""
    answer = found.admission_answer
    about = "webhook pod.kvplace.io"
    if answer == ADMITTED:
        yield wrong(
            about,
            "the API server accepted a trial pod with an unknown annotation: it does not call the webhook",
            APPLY_AGAIN,
        )
    elif "failed calling webhook" in answer:
        yield wrong(
            about,
            f"the API server cannot call it: {answer}",
            "check the Deployment of serve, its Service, network policies and the caBundle",
        )


def check_policies(found: Installation) -> Iterator[Finding]:
    """Check that the admission policies are active."""
    has_agent = bool(found.component("daemonsets", AGENT))
    for name in POLICIES:
        if name.startswith(_OF_AGENTS) and not has_agent:
            continue  # there are no writes to bound
        about = f"ValidatingAdmissionPolicy {name}"
        policy = found.named("validatingadmissionpolicies", name)
        bindings = [
            one
            for one in found.of("validatingadmissionpolicybindings")
            if at(one, "spec", "policyName") == name
        ]
        if name == _WARNS:
            if policy is None or not bindings:
                yield warning(
                    about, "it is not active: a misspelt annotation is ignored without a warning", APPLY_AGAIN
                )
        elif policy is None:
            yield wrong(about, "it is missing, so nothing refuses forbidden writes", APPLY_AGAIN)
        elif not any("Deny" in (at(one, "spec", "validationActions") or ()) for one in bindings):
            yield wrong(about, "no binding activates it with Deny", APPLY_AGAIN)
        else:
            for found_warning in items_at(policy, "status", "typeChecking", "expressionWarnings"):
                text = str(found_warning.get("warning", "")).splitlines()
                yield warning(about, f"the API server warns: {text[0] if text else ''}", APPLY_AGAIN)


def check_certificates(found: Installation) -> Iterator[Finding]:
    """Check the certificates that cert-manager renews, where it does."""
    for one in found.of("certificates"):
        about = object_name(one, "Certificate")
        ready, end = condition(one, "Ready"), at(one, "status", "notAfter")
        if ready.get("status") == "False":
            yield wrong(about, f"cert-manager cannot issue it: {ready.get('message')}", "see its events")
        elif end and datetime.fromisoformat(str(end)) <= found.now:
            yield wrong(about, f"it ended on {end}", "read the log of cert-manager")


def secrets_of(deployments: Iterable[Document]) -> dict[tuple[str, str], list[str]]:
    """Return the Secrets, by namespace and name, that the pods of our programs need to start."""
    used: dict[tuple[str, str], list[str]] = {}
    for one in deployments:
        for volume in items_at(one, "spec", "template", "spec", "volumes"):
            secret = volume.get("secret") or {}
            if secret.get("secretName") and not secret.get("optional"):
                name = (one["metadata"]["namespace"], str(secret["secretName"]))
                used.setdefault(name, [])
                if object_name(one, "Deployment") not in used[name]:
                    used[name].append(object_name(one, "Deployment"))
    return used


def check_secrets(found: Installation) -> Iterator[Finding]:
    """Check that the Secrets with certificates are there; their content is not read."""
    there = {(one["metadata"]["namespace"], one["metadata"]["name"]) for one in found.of("secrets")}
    for (namespace, name), users in secrets_of(found.of("deployments")).items():
        if (namespace, name) in there:
            continue
        if keepers := found.component("deployments", CERTIFICATES):
            keeper = at(keepers[0], "metadata", "namespace")
            fix = f"the Deployment kvplace-certificates makes it: see `kubectl -n {keeper} logs "
            fix += "deployment/kvplace-certificates`"
        elif any(at(one, "spec", "secretName") == name for one in found.of("certificates")):
            fix = f"cert-manager makes it: see `kubectl -n {namespace} describe certificates`"
        else:
            fix = (
                "nothing in the cluster makes it: build your folder on default, cert-manager or "
                'own-certificates, not on base ("Certificates" in Install kvplace)'
            )
        yield wrong(
            f"Secret {namespace}/{name}", f"it is missing, and pods of {some(users)} wait for it", fix
        )
