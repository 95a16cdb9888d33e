"""Which call gets which fault, and whom a played kubelet rejects."""

from __future__ import annotations

from typing import Any

import pytest

from harness.control_plane.kubelet_admission import cpu_request, rejection
from harness.faults.proxy import verb_and_resource
from harness.faults.script import EVENT, Answer, Cut, DropAnswer, Rule, Script


@pytest.mark.parametrize(
    ("method", "path", "watch", "expected"),
    [
        ("GET", "/api/v1/pods", False, ("list", "pods")),
        ("GET", "/api/v1/pods", True, ("watch", "pods")),
        ("GET", "/api/v1/namespaces/a/pods/b", False, ("get", "pods")),
        ("POST", "/api/v1/namespaces/a/pods/b/binding", False, ("create", "pods/binding")),
        ("PUT", "/apis/kvplace.io/v1alpha1/nodeledgers/n", False, ("update", "nodeledgers")),
        (
            "PATCH",
            "/apis/kvplace.io/v1alpha1/nodetopologies/n/status",
            False,
            ("patch", "nodetopologies/status"),
        ),
        ("GET", "/api/v1/namespaces/a", False, ("get", "namespaces")),
        ("GET", "/readyz", False, ("get", "/readyz")),
    ],
)
def test_a_request_is_named_in_the_words_of_rbac(
    method: str, path: str, watch: bool, expected: tuple[str, str]
) -> None:
    assert verb_and_resource(method, path, watch=watch) == expected


def test_a_rule_counts_the_calls_that_match_and_fails_the_nth_and_those_after_it() -> None:
    script = Script()
    script.play([Rule("create", "pods/binding", Cut(), nth=2, times=2)])
    script.next_fault("update", "nodeledgers")
    calls = [script.next_fault("create", "pods/binding") for _ in range(4)]
    assert calls == [None, Cut(), Cut(), None]


def test_of_two_rules_for_one_call_the_first_one_counts_and_both_count_the_call() -> None:
    script = Script()
    script.play([Rule("get", "pods", Cut()), Rule("*", "*", DropAnswer(), nth=2)])
    assert [script.next_fault("get", "pods") for _ in range(3)] == [Cut(), DropAnswer(), None]


def test_a_rule_for_every_call_leaves_events_of_watches_alone() -> None:
    script = Script()
    script.play([Rule("*", "*", Cut())])
    assert script.next_fault(EVENT, "pods") is None
    assert script.next_fault("watch", "pods") == Cut()


def test_faults_that_do_not_come_are_named() -> None:
    script = Script()
    script.play([Rule("get", "pods", Answer(500, "InternalError"), nth=7)])
    with pytest.raises(TimeoutError, match="Answer at get pods 7"):
        script.wait_until_played(0.0)


def pod(*cpus: str, phase: str = "Running") -> dict[str, Any]:
    containers = [{"resources": {"requests": {"cpu": one}}} for one in cpus]
    return {"spec": {"containers": containers}, "status": {"phase": phase}}


def test_a_kubelet_rejects_the_pod_whose_request_no_longer_fits() -> None:
    assert cpu_request(pod("1500m", "2", "0.5")) == 4000
    assert rejection(pod("1"), [pod("2"), pod("1")], 4) is None
    rejected = rejection(pod("1"), [pod("2"), pod("1500m")], 4)
    assert rejected is not None
    assert rejected["reason"] == "OutOfcpu"
    assert "requested: 1000, used: 3500, capacity: 4000" in rejected["message"]


def test_an_ended_program_leaves_its_place_to_others() -> None:
    assert rejection(pod("4"), [pod("4", phase="Failed")], 4) is None
