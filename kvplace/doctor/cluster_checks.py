"""Checks of the base of an installation: the API server and our kinds in it, KubeVirt, parts and rights.

A program without a right fails only when it needs the right, so the rights are checked here. A missing or
partial installation is found, and so are the rights to complete it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from kvplace.core.node_topology import VERSION
from kvplace.core.well_known_names import PLUGIN_SOCKET, FrontEnd
from kvplace.doctor.admission_checks import POLICIES, WEBHOOKS
from kvplace.doctor.installation import (
    APPLY_AGAIN,
    SERVE,
    Finding,
    Installation,
    object_name,
    setting_of_serve,
    some,
    warning,
    wrong,
)
from kvplace.kube.api_errors import OWNERSHIP_RULE
from kvplace.kube.object_client import Document, at, condition, items_at

KINDS = ("nodeledgers.kvplace.io", "nodetopologies.kvplace.io")
OLDEST_KUBERNETES = (1, 31)
"""The first release with all fields that our policies and CRDs need."""

_FRONT_ENDS = {FrontEnd.ANNOTATION: "Sidecar", FrontEnd.PLUGIN: "Plugins"}
"""The feature gate that each front end needs."""
PLUGINS_CRD = "plugins.plugin.kubevirt.io"
PLUGIN = "kvplace"
_COMPONENT = 'see "KubeVirt Plugins" in Install kvplace: add the component plugin, and apply your folder'
_ANNOTATION = "until then, remove the component plugin from your folder, and apply it"
_GATES = "/spec/configuration/developerConfiguration/featureGates"
OLDEST_KUBEVIRT = (1, 6)
"""The oldest supported release."""
Right: TypeAlias = tuple[str, str, str]
"""A verb, a resource of the cluster with its subresource, and its group."""


def _rights(verbs: str, resource: str, group: str = "") -> tuple[Right, ...]:
    return tuple((verb, resource, group) for verb in verbs.split())


INSTALLED = (
    *_rights("create", "customresourcedefinitions", "apiextensions.k8s.io"),
    *_rights("create", "clusterroles", "rbac.authorization.k8s.io"),
    *_rights("create", "mutatingwebhookconfigurations", "admissionregistration.k8s.io"),
    *_rights("create", "validatingadmissionpolicies", "admissionregistration.k8s.io"),
    *_rights("create", "namespaces"),
)
"""Rights that an installation needs, and that only a cluster administrator has."""
NEEDED = ("customresourcedefinitions", "validatingadmissionpolicies", "deployments", *WEBHOOKS)
"""The resources that must have been read to know the parts."""
_OURS = "kvplace.io"


def is_too_old(found: Installation) -> bool | None:
    """Whether the API server lacks kinds that kvplace needs; None where its release cannot be read."""
    match = re.match(r"v?(\d+)\.(\d+)", found.server_version)
    return None if match is None else (int(match[1]), int(match[2])) < OLDEST_KUBERNETES


def check_version(found: Installation) -> Iterator[Finding]:
    """Check that the release of the API server is new enough for kvplace."""
    too_old = is_too_old(found)
    if too_old is None:
        yield warning(
            "API server", f"its version {found.server_version!r} cannot be read", "check it by hand"
        )
    elif too_old:
        oldest = ".".join(map(str, OLDEST_KUBERNETES))
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
            yield wrong(about, "it is not installed", APPLY_AGAIN)
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
                about, "it lacks the rule that a core is released before it gets another owner", APPLY_AGAIN
            )
        established = condition(crd, "Established")
        if established.get("status") != "True":
            reason = established.get("message") or "the API server has not accepted it yet"
            yield wrong(about, f"it is not served: {reason}", "run `kubectl describe crd` for it")


def check_kubevirt(found: Installation) -> Iterator[Finding]:
    """Check KubeVirt's own object."""
    there = found.of("kubevirts")
    if not there:
        yield warning(
            "KubeVirt",
            "there is no KubeVirt object: only plain pods can request cores",
            "install KubeVirt, unless no VM is to run here",
        )
    front_end = _front_end(found)
    gate = _FRONT_ENDS[front_end]
    for one in there:
        about = object_name(one, "KubeVirt")
        if not _has_gate(one, gate):
            effect = (
                "KubeVirt refuses VMs that opted in"
                if front_end is FrontEnd.ANNOTATION
                else "KubeVirt calls no Plugin, and admission refuses the pods of VMs that opted in"
            )
            yield wrong(about, f"the feature gate {gate} is off: {effect}", _switch_on(one, gate))
        version = at(one, "status", "observedKubeVirtVersion") or ""
        match = re.match(r"v(\d+)\.(\d+)", version)
        if match is not None and (int(match[1]), int(match[2])) < OLDEST_KUBEVIRT:
            oldest = ".".join(map(str, OLDEST_KUBEVIRT))
            yield warning(about, f"KubeVirt {version} is older than v{oldest}", "upgrade KubeVirt")
        available = condition(one, "Available")
        if available.get("status") == "False":
            yield wrong(about, f"it is not available: {available.get('message')}", "see virt-operator's log")


def check_plugins(found: Installation) -> Iterator[Finding]:
    """Check KubeVirt's Plugins: the form of their CRD, kvplace's own one where it is used, and others."""
    is_ours = _front_end(found) is FrontEnd.PLUGIN
    if is_ours:
        yield from _own_plugin(found)
    if any(_has_gate(one, _FRONT_ENDS[FrontEnd.PLUGIN]) for one in found.of("kubevirts")):
        others = [one["metadata"]["name"] for one in found.of("plugins") if one["metadata"]["name"] != PLUGIN]
        if others:
            yield warning(
                f"Plugins {some(others)}" if len(others) > 1 else f"Plugin {others[0]}",
                "with it, KubeVirt converts the domain of every VM, and it may change the pins and NUMA "
                "nodes that the hook has written",
                "check that it leaves the elements cputune and numatune of VMs that opted in",
            )


def _own_plugin(found: Installation) -> Iterator[Finding]:
    crd = found.named("customresourcedefinitions", PLUGINS_CRD)
    if crd is None:
        yield wrong(
            f"CustomResourceDefinition {PLUGINS_CRD}",
            "KubeVirt has no Plugins, and the setting SIDECAR is plugin: no hook is called",
            f"upgrade KubeVirt to v1.9; {_ANNOTATION}",
        )
        return
    hooks = {
        hook
        for version in items_at(crd, "spec", "versions")
        for hook in at(version, "schema", "openAPIV3Schema", "properties", "spec", "properties") or {}
    }
    if "launcherHooks" in hooks and "domainHooks" not in hooks:
        yield wrong(
            f"CustomResourceDefinition {PLUGINS_CRD}",
            "it has launcherHooks, and the Plugin of this release of kvplace has domainHooks",
            f"use a newer release of kvplace; {_ANNOTATION}",
        )
        return
    plugin = found.named("plugins", PLUGIN)
    sockets = {
        at(hook, "sidecar", "socketPath")
        for hook in (items_at(plugin, "spec", "domainHooks") if plugin else ())
    }
    if PLUGIN_SOCKET not in sockets:
        state = "it does not call the hook" if plugin else "it is missing"
        yield wrong(f"Plugin {PLUGIN}", f"{state}: VMs that opted in run unpinned", _COMPONENT)
    elif plugin is not None and at(plugin, "spec", "condition"):
        yield wrong(
            f"Plugin {PLUGIN}",
            "it has a spec.condition, which some releases of KubeVirt cannot read: then no VM starts",
            "remove spec.condition; the condition of the hook suffices",
        )


def _front_end(found: Installation) -> FrontEnd:
    is_plugin = setting_of_serve(found, "SIDECAR") == FrontEnd.PLUGIN
    return FrontEnd.PLUGIN if is_plugin else FrontEnd.ANNOTATION


def _has_gate(kubevirt: Document, gate: str) -> bool:
    developer = at(kubevirt, "spec", "configuration", "developerConfiguration") or {}
    disabled = developer.get("disabledFeatureGates") or ()
    return gate in (developer.get("featureGates") or ()) and gate not in disabled


def _switch_on(kubevirt: Document, gate: str) -> str:
    """Name the command that switches a feature gate on."""
    metadata = kubevirt["metadata"]
    developer = at(kubevirt, "spec", "configuration", "developerConfiguration") or {}
    target = f"kubectl -n {metadata.get('namespace')} {{}} kubevirt {metadata['name']}"
    if gate in (developer.get("disabledFeatureGates") or ()):
        return f"remove {gate} from disabledFeatureGates: `{target.format('edit')}`"
    if developer.get("featureGates"):
        added = [{"op": "add", "path": f"{_GATES}/-", "value": gate}]
        return f"`{target.format('patch')} --type=json -p '{json.dumps(added)}'`"
    patch = {"spec": {"configuration": {"developerConfiguration": {"featureGates": [gate]}}}}
    return f"`{target.format('patch')} --type=merge -p '{json.dumps(patch)}'`"


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
            f"only a part is installed ({', '.join(there)}); missing: {', '.join(missing)}",
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


RIGHTS: Mapping[str, tuple[Right, ...]] = {
    "serve": (
        *_rights("get list watch patch", "pods"),
        *_rights("create", "pods/binding"),
        *_rights("list watch patch", "nodes"),
        *_rights("get list watch create update patch delete", "nodeledgers", _OURS),
        *_rights("list watch", "nodetopologies", _OURS),
        *_rights("get list watch", "virtualmachineinstances", "kubevirt.io"),
        *_rights("create", "events", "events.k8s.io"),
    ),
    "agent": (
        *_rights("list watch", "pods"),
        *_rights("patch", "pods/status"),
        *_rights("list watch patch", "nodes"),
        *_rights("list watch create patch", "nodetopologies", _OURS),
        *_rights("patch", "nodetopologies/status", _OURS),
        *_rights("list watch", "nodeledgers", _OURS),
    ),
}
"""The rights that the programs cannot work without; manifests/ has all of them."""


def check_rights(found: Installation) -> Iterator[Finding]:
    """Check that the service accounts of our programs have their rights."""
    for identity, missing in found.rights.items():
        if missing:
            yield wrong(
                identity,
                f"it lacks the rights to {some(missing, 6)}",
                APPLY_AGAIN,
            )
