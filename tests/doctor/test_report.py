"""What `doctor` prints."""

from __future__ import annotations

from kvplace.cli.doctor_command import report_lines
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
