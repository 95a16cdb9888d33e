"""Each alert fires when it should and not before: Prometheus' own engine evaluates the rules.

Its parser reads the expressions of the dashboard, too.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.reading import PROJECT

Json = dict[str, Any]

MONITORING = PROJECT / "manifests" / "monitoring"
RULES = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["spec"]
READY = 'kvplace_process_ready{process="serve", pod="kvplace-serve-1"} 1x200'
AGENTS = (
    'kvplace_agent_enforces{pod="kvplace-agent-1", node="worker-1"} 1x200',
    'kvplace_agent_enforces{pod="kvplace-agent-2", node="worker-2"} 1x200',
    'kvplace_agent_enforces{pod="kvplace-agent-3", node="with-static-policy"} 0x200',
)
ENFORCED = tuple(
    f'kvplace_cluster_enforced_node{{pod="{replica}", node="{node}"}} 1x200'
    for replica in ("kvplace-serve-1", "kvplace-serve-2")
    for node in ("worker-1", "worker-2")
)
WAITING = 'vm_namespace="shop", vm="db"'
FAILED = 'node="worker-1", condition="CpusetsEnforced", reason="RuntimeUnavailable"'
VM = 'node="worker-1", vm_namespace="shop", vm="db"'
OF_THE_AGENT = f'pod="kvplace-agent-1", namespace="kvplace-agent", {VM}'
HEALTHY = (
    READY,
    'kvplace_process_ready{process="serve", pod="kvplace-serve-2"} 0x200',
    'kvplace_agent_pods{pod="kvplace-agent-1", node="worker-1", pinned="true"} 2x200',
    f'kvplace_agent_not_pinned{{{OF_THE_AGENT}, reason="Floats"}} 1x200',
    'kvplace_extender_bind_seconds_count{outcome="bound"} 0+10x200',
    'kvplace_extender_bind_seconds_count{outcome="refused"} 0+1x200',
    *ENFORCED,
    *AGENTS,
)
"""The samples of a cluster without faults, a value for each minute."""
SEVERITIES = {
    rule["alert"]: rule["labels"]["severity"] for group in RULES["groups"] for rule in group["rules"]
}
DAY = 86400

Ask = Callable[..., list[Json]]


@dataclass(frozen=True)
class Case:
    """Series with which an alert does not fire at a minute and does at a later one."""

    alert: str
    series: tuple[str, ...]
    quiet: int
    fires: int
    says: str
    """Its summary then."""
    labels: str = ""
    """Its labels beside the severity, as in an expression."""


CASES = (
    Case(
        "KvplaceServeDown",
        (READY.replace("1x200", "1x2 0x200"), *HEALTHY[1:]),
        7,
        9,
        "No replica of kvplace serve is ready",
    ),
    Case(
        "KvplaceCoresOverlap",
        (*HEALTHY, f'kvplace_cluster_overlapping_pod{{pod="kvplace-serve-1", {VM}}} _x21 1x200'),
        20,
        22,
        "VM shop/db on worker-1 runs on CPUs that it does not own",
        VM,
    ),
    Case(
        "KvplaceAgentDown",
        (*HEALTHY[:-2], AGENTS[1].replace("1x200", "1x2"), AGENTS[2]),
        16,
        20,
        "The agent of node worker-2 is down",
        'node="worker-2"',
    ),
    Case(
        "KvplaceNodeConditionFailed",
        (
            *HEALTHY,
            f'kvplace_agent_failed_condition{{pod="kvplace-agent-1", {FAILED}}} _x5 1x200',
        ),
        9,
        11,
        "Condition CpusetsEnforced of node worker-1 is False: RuntimeUnavailable",
        FAILED,
    ),
    Case(
        "KvplaceNotPinned",
        (
            *HEALTHY,
            f'kvplace_agent_not_pinned{{{OF_THE_AGENT}, reason="CpusetDiffers"}} _x5 1x4',
            f'kvplace_agent_not_pinned{{{OF_THE_AGENT}, reason="ThreadsElsewhere"}} _x9 1x200',
        ),
        14,
        16,
        "VM shop/db on worker-1 is not pinned",
        VM,
    ),
    Case(
        "KvplaceDriftGivenUp",
        (*HEALTHY, f'kvplace_agent_not_pinned{{{OF_THE_AGENT}, reason="RepairsUndone"}} _x21 1'),
        20,
        23,
        "Another program moves the threads of VM shop/db on worker-1",
        VM,
    ),
    Case(
        "KvplaceVmsWait",
        (
            *HEALTHY,
            'kvplace_cluster_pods{state="waiting"} 7x200',
            f'kvplace_cluster_oldest_waiting_pod_seconds{{pod="kvplace-serve-1", {WAITING}}} 0+60x200',
        ),
        30,
        33,
        "VM shop/db has waited for cores for 33m 0s",
        WAITING,
    ),
    Case(
        "KvplaceBindsRefused",
        (*HEALTHY, 'kvplace_extender_bind_seconds_count{outcome="refused", pod="kvplace-serve-2"} 0+5x200'),
        15,
        18,
        "37.5% of the binds of the last ten minutes were refused",
    ),
    Case(
        "KvplaceClaimUnbound",
        (*HEALTHY, f'kvplace_ledger_oldest_unbound_claim_seconds{{pod="kvplace-serve-1", {VM}}} 0+60x200'),
        10,
        12,
        "The claim of shop/db on worker-1 has had no bound pod for 12m 0s",
        VM,
    ),
    Case(
        "KvplaceWatchSilent",
        (*HEALTHY, 'kvplace_watch_age_seconds{pod="kvplace-serve-1", kind="pods"} 0+60x200'),
        7,
        9,
        "Replica kvplace-serve-1 has received nothing about pods for 9m 0s",
        'pod="kvplace-serve-1", kind="pods"',
    ),
    Case(
        "KvplaceNodesUnusable",
        (*HEALTHY, 'kvplace_cluster_unusable_node{pod="kvplace-serve-1", node="worker-9"} _x5 1x200'),
        60,
        66,
        "No VM can be placed on node worker-9",
        'node="worker-9"',
    ),
    Case(
        "KvplaceCertificateEnds",
        (
            *HEALTHY,
            f'kvplace_process_certificate_end_timestamp_seconds{{use="server"}} {3 * DAY}x200',
            f'kvplace_process_certificate_end_timestamp_seconds{{use="client-ca"}} {60 * DAY}x200',
        ),
        59,
        61,
        "The server certificate of kvplace serve expires in 2d 22h 59m 0s",
        'use="server"',
    ),
)


def shown() -> Iterator[str]:
    """List what the panels of the dashboard ask Prometheus."""
    for panel in json.loads((MONITORING / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


@pytest.fixture(scope="session")
def ask(alerts_program: Path) -> Ask:
    """Ask which alerts fire at a minute."""

    def run(series: tuple[str, ...], minute: int, rules: Json = RULES) -> list[Json]:
        question = {"rules": yaml.safe_dump(rules), "series": series, "minute": minute}
        done = subprocess.run(
            [alerts_program], input=json.dumps(question), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found: list[Json] = json.loads(done.stdout)
        return found

    return run


def test_every_alert_has_a_case() -> None:
    assert {case.alert for case in CASES} == SEVERITIES.keys()


@pytest.mark.parametrize("minute", [0, 30, 120])
def test_a_healthy_cluster_is_quiet(ask: Ask, minute: int) -> None:
    assert ask(HEALTHY, minute) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_fires_after_its_time_alone_and_names_the_fault(ask: Ask, case: Case) -> None:
    assert ask(case.series, case.quiet) == []
    (found,) = ask(case.series, case.fires)
    assert found["alert"] == case.alert
    assert found["annotations"]["summary"] == case.says
    labels = dict(re.findall(r'(\w+)="([^"]+)"', case.labels))
    assert (
        found["labels"].items() - {("alertname", case.alert), ("severity", SEVERITIES[case.alert])}
        == labels.items()
    )


def test_without_any_metrics_serve_is_down(ask: Ask) -> None:
    (found,) = ask((), 6)
    assert found["alert"] == "KvplaceServeDown"


def test_with_all_agents_gone_there_is_an_alert_for_each_node(ask: Ask) -> None:
    found = ask(tuple(one for one in HEALTHY if "kvplace_agent_enforces" not in one), 20)
    assert {one["labels"]["node"] for one in found} == {"worker-1", "worker-2"}


def test_an_agent_that_runs_and_enforces_nothing_yet_is_down(ask: Ask) -> None:
    (found,) = ask((*HEALTHY[:-2], AGENTS[1].replace("1x200", "0x200"), AGENTS[2]), 20)
    assert found["labels"]["node"] == "worker-2"


def test_a_node_without_an_agent_by_choice_is_not_an_alert(ask: Ask) -> None:
    assert ask((READY,), 60) == []


def test_refused_binds_among_many_are_not_an_alert(ask: Ask) -> None:
    refused = 'kvplace_extender_bind_seconds_count{outcome="refused", pod="kvplace-serve-2"} 0x100 1x100'
    assert ask((*HEALTHY, refused), 120) == []


def test_prometheus_reads_every_expression_of_the_dashboard(ask: Ask) -> None:
    rules = [{"alert": "Shown", "expr": expression} for expression in shown()]
    assert len(rules) > 10
    ask((), 0, {"groups": [{"name": "dashboard", "rules": rules}]})


def test_a_rule_with_a_mistake_is_refused(ask: Ask) -> None:
    wrong = {"groups": [{"name": "a", "rules": [{"alert": "A", "expr": "sum(up", "for": "5m"}]}]}
    with pytest.raises(AssertionError, match="unclosed left parenthesis"):
        ask((), 0, wrong)
