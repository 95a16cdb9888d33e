"""A command that watches reports once that the API server is unavailable."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvplace.cli.live_cluster import REPEATED_S, OneSentence, outages_in_one_sentence
from kvplace.core.errors import KvplaceError
from kvplace.kube import list_watch
from kvplace.kube.api_errors import ApiUnavailable, Expired
from kvplace.kube.list_watch import _report
from tests.cli.calls import Caller
from tests.kube.api_stub import ApiStub

REFUSED = ApiUnavailable("watch nodes: no connection: refused")


def failed(resource: str, failure: KvplaceError) -> None:
    """Let a watch report a failure, as it does before it pauses."""
    _report(resource, failure, 0.1)


def test_three_watches_that_fail_again_and_again_are_one_sentence(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with outages_in_one_sentence("https://api:6443"):
        for _ in range(5):
            for resource in ("nodes", "nodetopologies", "nodeledgers"):
                failed(resource, REFUSED)
    assert capsys.readouterr().err == (
        "kvplace: https://api:6443 cannot be watched at the moment (watch nodes: no connection: refused); "
        "retrying\n"
    )
    assert not caplog.records


def test_an_outage_that_lasts_is_reported_again(capsys: pytest.CaptureFixture[str]) -> None:
    moments = [0.0, REPEATED_S - 1, REPEATED_S + 1]
    told: list[int] = []
    handler = OneSentence("https://api:6443", lambda: moments[len(told)])
    while len(told) < len(moments):
        handler.emit(logging.LogRecord("watch", logging.WARNING, "", 0, "%s", (REFUSED,), None))
        told.append(capsys.readouterr().err.count("cannot be watched"))
    assert told == [1, 0, 1]


def test_a_list_that_is_read_again_because_its_version_is_too_old_is_not_an_outage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with outages_in_one_sentence("https://api:6443"):
        failed("pods", Expired("watch pods: too old resource version"))
    assert not capsys.readouterr().err


def test_afterwards_the_watches_of_this_process_log_as_before(caplog: pytest.LogCaptureFixture) -> None:
    with outages_in_one_sentence("https://api:6443"):
        pass
    failed("pods", REFUSED)
    assert [record.name for record in caplog.records] == [list_watch.__name__]


@pytest.mark.parametrize(
    "command",
    [
        "get vms",
        "get nodes",
        "top",
        "top vms",
        "map --all",
        "explain vm/db",
        "doctor",
        "version",
        "plan --live --requests -",
        "rollout list",
        "rollout status web",
    ],
)
def test_a_server_that_is_down_is_one_sentence_of_every_command(
    command: str, tmp_path: Path, kvplace: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = ApiStub()
    nowhere.url = "http://127.0.0.1:1"
    monkeypatch.setenv("KUBECONFIG", str(nowhere.kubeconfig(tmp_path).kubeconfig))
    called = kvplace(*command.split(), stdin='{"vcpus": 4}')
    assert (called.code, called.out) == (1, "")
    *before, said = called.err.splitlines()
    assert len(before) == (command == "version")  # of which release the command is, it knows all the same
    assert said.startswith("kvplace: http://127.0.0.1:1 does not answer")
