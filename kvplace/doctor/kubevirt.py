"""Checks of KubeVirt: its feature gate for hook sidecars, version and availability."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from kvplace.doctor.finding import Finding, warning, wrong
from kvplace.doctor.installation import Installation, at, condition, title
from kvplace.kube.object_reader import Document

_GATE = "Sidecar"
_GATES = "/spec/configuration/developerConfiguration/featureGates"
OLDEST = (1, 6)
"""The oldest supported release."""


def check_kubevirt(found: Installation) -> Iterator[Finding]:
    """Check KubeVirt's own object."""
    there = found.of("kubevirts")
    if not there:
        yield warning(
            "KubeVirt",
            "there is no KubeVirt object: only plain pods can request cores",
            "install KubeVirt, unless no VM is to run here",
        )
    for one in there:
        about = title(one, "KubeVirt")
        developer = at(one, "spec", "configuration", "developerConfiguration") or {}
        gates = developer.get("featureGates") or ()
        is_disabled = _GATE in (developer.get("disabledFeatureGates") or ())
        if _GATE not in gates or is_disabled:
            yield wrong(
                about,
                f"the feature gate {_GATE} is off: KubeVirt refuses VMs that opted in",
                _switch_on(one, has_gates=bool(gates), is_disabled=is_disabled),
            )
        version = at(one, "status", "observedKubeVirtVersion") or ""
        match = re.match(r"v(\d+)\.(\d+)", version)
        if match is not None and (int(match[1]), int(match[2])) < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            yield warning(about, f"KubeVirt {version} is older than v{oldest}", "upgrade KubeVirt")
        available = condition(one, "Available")
        if available.get("status") == "False":
            yield wrong(about, f"it is not available: {available.get('message')}", "see virt-operator's log")


def _switch_on(kubevirt: Document, *, has_gates: bool, is_disabled: bool) -> str:
    """Name the command that switches the feature gate on."""
    metadata = kubevirt["metadata"]
    target = f"kubectl -n {metadata.get('namespace')} {{}} kubevirt {metadata['name']}"
    if is_disabled:
        return f"remove {_GATE} from disabledFeatureGates: `{target.format('edit')}`"
    if has_gates:
        added = [{"op": "add", "path": f"{_GATES}/-", "value": _GATE}]
        return f"`{target.format('patch')} --type=json -p '{json.dumps(added)}'`"
    patch = {"spec": {"configuration": {"developerConfiguration": {"featureGates": [_GATE]}}}}
    return f"`{target.format('patch')} --type=merge -p '{json.dumps(patch)}'`"
