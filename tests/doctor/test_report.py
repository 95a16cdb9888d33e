"""The output of `doctor`."""

from __future__ import annotations

import ast
import re

import pytest
from click.testing import CliRunner

from kvplace.cli.doctor_command import command, report_lines
from kvplace.core.errors import ExitCode
from kvplace.doctor.admission_checks import LEFT_ALONE
from kvplace.doctor.examination import Examination, Examined
from kvplace.doctor.installation import Check, Finding, Severity, wrong
from tests.docs.reading import PROJECT

SECTION = re.compile(r'"([^"]+)" in (Troubleshooting|Install kvplace|The node agent)')
SOURCES = sorted((PROJECT / "kvplace" / "doctor").glob("*.py"))
TEXTS = [
    node.value
    for source in SOURCES
    for parent in ast.walk(ast.parse(source.read_text()))
    if not isinstance(parent, ast.Expr)  # a docstring
    for node in ast.iter_child_nodes(parent)
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
]
DENIED = Finding(Severity.UNCHECKED, "deployments", "you may not list deployments", "ask an administrator")


def examined(name: str, *findings: Finding) -> Examined:
    return Examined(Check(name, (), lambda _: ()), findings)


def test_missing_rights_to_read_are_reported_once_and_last() -> None:
    found = Examination(
        (
            examined("serve", DENIED),
            examined("ledgers", wrong("NodeLedger a", "it cannot be read", "correct it")),
            examined("releases", DENIED),
            examined("kinds"),
        )
    )
    assert list(report_lines(found, wide=False)) == [
        "ledgers             wrong: NodeLedger a: it cannot be read",
        "                    fix: correct it",
        "unchecked           you may not list deployments: serve, releases",
        "                    fix: ask an administrator",
        "ok                  kinds",
        "2 unchecked, 1 wrong",
    ]
    assert len([line for line in report_lines(found, wide=True) if "unchecked: " in line]) == 2


@pytest.mark.parametrize("namespace", LEFT_ALONE)
def test_a_trial_pod_where_the_webhooks_see_none_would_state_nothing(namespace: str) -> None:
    answer = CliRunner().invoke(command, ["-n", namespace])
    assert answer.exit_code == ExitCode.USAGE
    assert f"the webhooks do not see pods of {namespace}: name another namespace with -n" in answer.output


def test_a_fix_names_a_section_of_the_documentation_by_its_title_and_no_path() -> None:
    pages = {
        text.partition("\n")[0].removeprefix("# "): set(re.findall(r"^#+ (.*)$", text, re.MULTILINE))
        for text in (path.read_text() for path in (PROJECT / "docs").glob("*.md"))
    }
    named = [found for text in TEXTS for found in SECTION.findall(text)]
    assert len(named) > 4
    assert [(section, page) for section, page in named if section not in pages[page]] == []
    assert [text for text in TEXTS if "docs/" in text or "manifests/" in text] == []
