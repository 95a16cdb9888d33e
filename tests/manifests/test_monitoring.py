"""Alerts and dashboard ask for metrics that there are, and lead to help."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.docs.reading import first_cells, page, section

MONITORING = Path(__file__).resolve().parents[2] / "manifests" / "monitoring"
(GROUP,) = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["spec"]["groups"]
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


def test_every_alert_leads_to_a_section_that_exists() -> None:
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", page("troubleshoot.md"), re.MULTILINE)
    }
    for rule in GROUP["rules"]:
        _, _, anchor = rule["annotations"]["runbook_url"].partition("docs/troubleshoot.md#")
        assert anchor in anchors, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert {"summary", "description"} <= rule["annotations"].keys()


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
