"""KubeVirt: there, with hook sidecars allowed, of a version that kvplace knows."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvplace.doctor.finding import Finding, warning, wrong
from kvplace.doctor.installation import Installation, at, condition, title

_GATE = "Sidecar"
OLDEST = (1, 6)
"""The oldest release whose hooks were read."""


def check_kubevirt(found: Installation) -> Iterator[Finding]:
    """Check KubeVirt's own object."""
    there = found.of("kubevirts")
    if not there:
        yield warning(
            "KubeVirt",
            "there is no KubeVirt object: only plain pods can ask for cores",
            "install KubeVirt, unless no VM is to run here",
        )
    for one in there:
        about = title(one, "KubeVirt")
        developer = at(one, "spec", "configuration", "developerConfiguration") or {}
        gates = developer.get("featureGates") or ()
        if _GATE not in gates or _GATE in (developer.get("disabledFeatureGates") or ()):
            yield wrong(
                about,
                f"the feature gate {_GATE} is off: KubeVirt refuses VMs that ask for cores",
                f"add {_GATE} to spec.configuration.developerConfiguration.featureGates: docs/install.md "
                "section 1 has the command",
            )
        version = at(one, "status", "observedKubeVirtVersion") or ""
        match = re.match(r"v(\d+)\.(\d+)", version)
        if match is not None and (int(match[1]), int(match[2])) < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            yield warning(about, f"KubeVirt {version} is older than v{oldest}", "upgrade KubeVirt")
        available = condition(one, "Available")
        if available.get("status") == "False":
            yield wrong(about, f"it is not available: {available.get('message')}", "see virt-operator's log")
