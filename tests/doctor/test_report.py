"""What `doctor` prints."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from kvplace.cli.doctor_command import command, report_lines
from kvplace.core.errors import ExitCode
from kvplace.doctor.admission import LEFT_ALONE
from kvplace.doctor.examination import Examination, Examined
from kvplace.doctor.finding import Check, Finding, Level, wrong

DENIED = Finding(Level.UNCHECKED, "deployments", "you may not list deployments", "ask an administrator")


def examined(name: str, *findings: Finding) -> Examined:
    return Examined(Check(name, (), lambda _: ()), findings)


def test_what_may_not_be_read_is_said_once_and_last() -> None:
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
        "                    mend: correct it",
        "unchecked           you may not list deployments: serve, releases",
        "                    mend: ask an administrator",
        "ok                  kinds",
        "2 unchecked, 1 wrong",
    ]
    assert len([line for line in report_lines(found, wide=True) if "unchecked: " in line]) == 2


@pytest.mark.parametrize("namespace", LEFT_ALONE)
def test_a_trial_pod_where_the_webhooks_see_none_would_say_nothing(namespace: str) -> None:
    answer = CliRunner().invoke(command, ["-n", namespace])
    assert answer.exit_code == ExitCode.USAGE
    assert f"the webhooks do not see pods of {namespace}: name another namespace with -n" in answer.output
