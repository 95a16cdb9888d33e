"""Each alert fires when it should and not before: Prometheus' own engine evaluates the rules.

Its parser reads the expressions of the dashboard, too.
"""

from __future__ import annotations

import json
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
NAMES = {rule["alert"] for group in RULES["groups"] for rule in group["rules"]}
HEALTHY = (
    'kvplace_cluster_nodes{state="usable"} 3x200',
    'kvplace_agent_pods{pod="a", pinned="true"} 2x200',
    'kvplace_cluster_enforced_nodes{pod="serve"} 2x200',
    'kvplace_agent_enforces{pod="a"} 1x200',
    'kvplace_agent_enforces{pod="b"} 1x200',
    'kvplace_agent_enforces{pod="under the static policy"} 0x200',
)
"""What is always there, a value for each minute."""
DAY = 86400

Ask = Callable[..., list[Json]]


@dataclass(frozen=True)
class Case:
    """Series with which an alert does not fire at a minute and does at a later one."""

    alert: str
    series: tuple[str, ...]
    quiet: int
    fires: int
    says: str = ""
    """What its summary says then."""


CASES = (
    Case("KvplaceServeDown", (HEALTHY[0].replace("3x200", "3x2"), *HEALTHY[1:]), 11, 15),
    Case("KvplaceCoresOverlap", (*HEALTHY, "kvplace_controller_overlaps_total 0x20 1x200"), 20, 22),
    Case(
        "KvplaceVmsWait",
        (
            *HEALTHY,
            'kvplace_cluster_pods{state="waiting"} 7x200',
            "kvplace_cluster_oldest_waiting_pod_seconds 0+60x200",
        ),
        30,
        33,
        "A pod has waited for cores for 33m 0s",
    ),
    Case(
        "KvplaceBindsRefused",
        (*HEALTHY, 'kvplace_extender_bind_seconds_count{outcome="refused"} 0+1x200'),
        15,
        18,
    ),
    Case(
        "KvplaceClaimUnbound",
        (*HEALTHY, "kvplace_ledger_oldest_unbound_claim_seconds 0+60x200"),
        10,
        12,
        "A claim has had no bound pod for 12m 0s",
    ),
    Case(
        "KvplaceWatchSilent",
        (*HEALTHY, 'kvplace_watch_age_seconds{kind="pods"} 0+60x200'),
        7,
        9,
        "kvplace serve has heard nothing of pods for 9m 0s",
    ),
    Case("KvplaceNodesUnusable", (*HEALTHY, 'kvplace_cluster_nodes{state="unusable"} 0x4 2x200'), 60, 66),
    Case(
        "KvplaceCertificateEnds",
        (
            *HEALTHY,
            f'kvplace_process_certificate_end_timestamp_seconds{{use="server"}} {3 * DAY}x200',
            f'kvplace_process_certificate_end_timestamp_seconds{{use="client"}} {60 * DAY}x200',
        ),
        59,
        61,
        "The server certificate ends in 2d 22h 59m 0s",
    ),
    Case("KvplaceNotPinned", (*HEALTHY, 'kvplace_agent_pods{pod="a", pinned="false"} 0x4 1x200'), 14, 16),
    Case(
        "KvplaceDriftGivenUp",
        (*HEALTHY, 'kvplace_agent_drifts_total{pod="a", outcome="given-up"} 0x20 1x200'),
        20,
        22,
    ),
    Case(
        "KvplaceAgentDown",
        (*HEALTHY[:4], 'kvplace_agent_enforces{pod="b"} 1x2', HEALTHY[5]),
        16,
        20,
        "The agent of 1 nodes does not answer",
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
    assert {case.alert for case in CASES} == NAMES


@pytest.mark.parametrize("minute", [0, 30, 120])
def test_a_healthy_cluster_is_quiet(ask: Ask, minute: int) -> None:
    assert ask(HEALTHY, minute) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_fires_when_its_time_has_come_and_alone(ask: Ask, case: Case) -> None:
    assert ask(case.series, case.quiet) == []
    (found,) = ask(case.series, case.fires)
    assert found["alert"] == case.alert
    assert case.says in found["annotations"]["summary"]


def test_with_all_agents_gone_the_alert_counts_every_node(ask: Ask) -> None:
    (found,) = ask(tuple(one for one in HEALTHY if "kvplace_agent" not in one), 20)
    assert found["annotations"]["summary"] == "The agent of 2 nodes does not answer"


def test_a_node_without_an_agent_by_choice_is_no_alert(ask: Ask) -> None:
    described_by_hand = 'kvplace_cluster_enforced_nodes{pod="serve"} 0x200'
    assert ask((HEALTHY[0], described_by_hand), 60) == []


def test_prometheus_reads_every_expression_of_the_dashboard(ask: Ask) -> None:
    rules = [{"alert": "Shown", "expr": expression} for expression in shown()]
    assert len(rules) > 10
    ask((), 0, {"groups": [{"name": "dashboard", "rules": rules}]})


def test_a_rule_with_a_mistake_is_refused(ask: Ask) -> None:
    wrong = {"groups": [{"name": "a", "rules": [{"alert": "A", "expr": "sum(up", "for": "5m"}]}]}
    with pytest.raises(AssertionError, match="unclosed left parenthesis"):
        ask((), 0, wrong)
