"""Alerts and dashboard ask for metrics that there are, and lead to help."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.control_plane.cluster import ControlPlane
from tests.docs.blocks import block
from tests.docs.reading import first_cells, page, section

MONITORING = Path(__file__).resolve().parents[2] / "manifests" / "monitoring"
(GROUP,) = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["spec"]["groups"]
MONITORS = list(yaml.safe_load_all((MONITORING / "pod-monitors.yaml").read_text()))
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
_ADDED = re.compile(r"_(bucket|count|sum)$")


def expressions() -> Iterator[tuple[str, str]]:
    for rule in GROUP["rules"]:
        yield rule["alert"], rule["expr"]
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]


EXPRESSIONS = dict(expressions())


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_the_metrics_of_an_expression_exist(name: str) -> None:
    known = first_cells(section(page("reference/metrics.md"), "Metrics"))
    asked = set(re.findall(r"kvplace_[a-z_]+", EXPRESSIONS[name]))
    assert asked
    for metric in asked:
        assert {metric, _ADDED.sub("", metric)} & known, metric


PAGE = page("alerts.md")


def test_the_page_lists_every_alert_in_order_with_its_severity() -> None:
    rows = re.findall(r"^\| \[`(\w+)`\]\(#(\w+)\) \| (\w+) \|", PAGE, re.MULTILINE)
    assert rows == [
        (rule["alert"], rule["alert"].lower(), rule["labels"]["severity"]) for rule in GROUP["rules"]
    ]


@pytest.mark.parametrize("rule", GROUP["rules"], ids=lambda rule: rule["alert"])
def test_an_alert_links_to_its_section_with_meaning_urgency_and_action(rule: dict[str, Any]) -> None:
    assert rule["annotations"]["runbook_url"] == f"docs/alerts.md#{rule['alert'].lower()}"
    assert {"summary", "description"} <= rule["annotations"].keys()
    below = section(PAGE, rule["alert"])
    meaning, _, rest = below.partition("**Urgency: ")
    urgency, _, action = rest.partition("**Action.**")
    assert "**Meaning.**" in meaning
    assert urgency.startswith(f"{rule['labels']['severity']}.** ")
    assert action
    minutes = {int(found) for found in re.findall(r"(\d+) minutes", meaning)}
    limits = {int(found) // 60 for found in re.findall(r"> (\d+)$", rule["expr"])}
    assert minutes <= {*limits, int(rule["for"].removesuffix("m")) if rule["for"].endswith("m") else 0}


def test_alerts_link_to_the_address_that_the_block_of_the_page_sets(
    cluster: ControlPlane, tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    shutil.copytree(MONITORING.parent, tmp_path / "manifests")
    own = {"resources": ["../manifests/default"], "components": ["../manifests/monitoring"]}
    text = yaml.safe_dump(own) + block("docs/alerts.md", "- target: {kind: PrometheusRule")
    (folder / "kustomization.yaml").write_text(text)
    made = yaml.safe_load_all(cluster.kubectl("kustomize", str(folder)))
    (rules,) = (one for one in made if one["kind"] == "PrometheusRule")
    assert [rule["annotations"]["runbook_url"] for rule in rules["spec"]["groups"][0]["rules"]] == [
        f"https://wiki.example/kvplace/alerts#{rule['alert'].lower()}" for rule in GROUP["rules"]
    ]


def test_the_series_of_an_agent_carry_the_name_of_its_node() -> None:
    monitors = {one["metadata"]["name"]: one["spec"]["podMetricsEndpoints"] for one in MONITORS}
    assert monitors["kvplace-agent"][0]["relabelings"] == [
        {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}
    ]
    assert monitors["kvplace"][0]["honorLabels"] is True


def test_panels_of_the_dashboard_do_not_lie_over_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + column, place["y"] + row)
            for column in range(place["w"])
            for row in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
