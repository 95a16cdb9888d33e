"""All checks in their order, and their results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvplace.core.strict_json import Json
from kvplace.doctor.admission_checks import (
    check_admission_answers,
    check_certificates,
    check_policies,
    check_secrets,
    check_webhooks,
)
from kvplace.doctor.claim_checks import check_ledgers, check_vms
from kvplace.doctor.cluster_checks import (
    NEEDED,
    check_kinds,
    check_kubevirt,
    check_parts,
    check_plugins,
    check_rights,
    check_version,
    is_absent,
    is_too_old,
)
from kvplace.doctor.installation import Check, Finding, Installation, Severity
from kvplace.doctor.node_checks import (
    check_agents,
    check_conditions,
    check_descriptions,
    check_devices,
    check_kubelets,
    check_reserved,
)
from kvplace.doctor.program_checks import check_images, check_scheduler, check_serve, check_versions

VIEW, TRIAL, REVIEWS = "nodes, VMs and ledgers", "a trial pod", "rights of others"
"""Readings that are not a list of one kind."""

CHECKS = (
    Check("API server", (), check_version, before=True),
    Check("parts", NEEDED, check_parts, before=True),
    Check("kinds", ("customresourcedefinitions",), check_kinds),
    Check("serve", ("deployments",), check_serve),
    Check("scheduler", ("deployments", "configmaps", "leases"), check_scheduler),
    Check(
        "webhooks",
        ("mutatingwebhookconfigurations", "validatingwebhookconfigurations", "services"),
        check_webhooks,
    ),
    Check("admission answers", (TRIAL,), check_admission_answers),
    Check("certificates", ("certificates",), check_certificates),
    Check("secrets", ("deployments", "secrets"), check_secrets),
    Check(
        "policies",
        ("validatingadmissionpolicies", "validatingadmissionpolicybindings", "daemonsets"),
        check_policies,
    ),
    Check("rights", (REVIEWS,), check_rights),
    Check("images", ("pods", "waiting pods"), check_images),
    Check("releases", ("deployments", "daemonsets", "configmaps"), check_versions),
    Check("KubeVirt", ("kubevirts",), check_kubevirt, before=True),
    Check("Plugins", ("customresourcedefinitions", "kubevirts", "plugins", "configmaps"), check_plugins),
    Check("kubelets", ("nodes", "failed pods"), check_kubelets, before=True),
    Check("agents", ("daemonsets", "pods", "nodes", VIEW), check_agents),
    Check("descriptions", ("nodes", VIEW), check_descriptions),
    Check("conditions", (VIEW,), check_conditions),
    Check("reserved CPUs", (VIEW,), check_reserved),
    Check("devices", (VIEW,), check_devices),
    Check("ledgers", (VIEW,), check_ledgers),
    Check("VMs", (VIEW, "virtualmachineinstances"), check_vms),
)


@dataclass(frozen=True, slots=True)
class Examined:
    """The findings of one check; none without a fault."""

    check: Check
    findings: tuple[Finding, ...]

    @property
    def level(self) -> Severity | None:
        """The worst level of its findings; None without a finding."""
        return _worst(one.level for one in self.findings)


def _worst(levels: Iterable[Severity | None]) -> Severity | None:
    found = set(levels)
    return next((level for level in Severity if level in found), None)


@dataclass(frozen=True, slots=True)
class Examination:
    """The findings of all checks."""

    results: tuple[Examined, ...]

    @property
    def level(self) -> Severity | None:
        """The worst level of all findings; None without a finding."""
        return _worst(one.level for one in self.results)

    def document(self) -> Json:
        """Write it as JSON: a stable interface for programs."""
        return {
            "ok": self.level is None,
            "checks": [
                {
                    "name": one.check.name,
                    "result": "ok" if one.level is None else one.level.value,
                    "findings": [
                        {
                            "level": finding.level.value,
                            "about": finding.about,
                            "problem": finding.problem,
                            "fix": finding.fix,
                        }
                        for finding in one.findings
                    ],
                }
                for one in self.results
            ],
        }


def examine(installation: Installation) -> Examination:
    """Run all checks; a check without its objects reports the missing permission instead.

    Where kvplace is not installed, or the API server is too old, only the checks marked `before` run.
    """
    before = is_absent(installation) or bool(is_too_old(installation))
    return Examination(
        tuple(_examined(check, installation) for check in CHECKS if check.before or not before)
    )


def _examined(check: Check, installation: Installation) -> Examined:
    unread = {need: installation.denied[need] for need in check.needs if need in installation.denied}
    if unread:
        return Examined(
            check,
            tuple(
                Finding(
                    Severity.UNCHECKED,
                    need,
                    why,
                    "ask a cluster administrator to run this: it needs more rights than kvplace's roles",
                )
                for need, why in unread.items()
            ),
        )
    return Examined(check, tuple(check.run(installation)))
