"""The limits for one caller of the webhook addresses: bytes, containers, answers, turns."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest

from kvplace.admission.http import MAX_BODY_BYTES
from tests.admission.reviewed_objects import ASKS, Json, captured_pod, plain_pod, vmi, vmi_of
from tests.admission.webhooks import PATHS, Webhooks, question
from tests.kubevirt_documents import PODS


def test_a_body_of_more_than_2_mib_is_refused(webhooks: Webhooks) -> None:
    assert MAX_BODY_BYTES == 2 * 1024 * 1024
    fits = question(plain_pod(None)).ljust(MAX_BODY_BYTES)
    assert webhooks.post("/admit/pod", fits)[0] == 200
    status, text = webhooks.post("/admit/pod", fits + b" ")
    assert status == 413
    assert text.decode().startswith(f"Maximum request body size {MAX_BODY_BYTES} exceeded")


def test_a_body_that_unpacks_to_more_than_2_mib_is_refused(webhooks: Webhooks) -> None:
    packed = zlib.compress(b" " * (50 * 1024 * 1024))
    assert len(packed) < 100_000
    status, text = webhooks.post("/admit/pod", packed, **{"Content-Encoding": "deflate"})
    assert status == 413
    assert text.decode().startswith(f"Maximum request body size {MAX_BODY_BYTES} exceeded")


HOOK = {"name": "hook", "command": ["kvplace-hook"]}
EMPTY = {"name": "e"}


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            {"containers": [EMPTY] * 1025},
            "Pod default/solver has 1025 containers; a pod with a request may have 1024",
        ),
        (
            {"initContainers": [HOOK] * 1025},
            "Pod default/solver has 1026 containers; a pod with a request may have 1024",
        ),
        (
            {"ephemeralContainers": [EMPTY] * 1024},
            "Pod default/solver has 1025 containers; a pod with a request may have 1024",
        ),
        (
            {"containers": [EMPTY, HOOK, HOOK]},
            "Pod default/solver has 2 containers with the command kvplace-hook; keep one",
        ),
    ],
    ids=["containers", "init containers", "ephemeral containers", "hooks"],
)
def test_a_pod_of_more_containers_than_run_in_one_pod_is_refused(
    webhooks: Webhooks, more: Json, sentence: str
) -> None:
    status = webhooks.ask(plain_pod(**more))["status"]
    assert (status["code"], status["message"]) == (422, sentence)


def _many_hooks() -> Json:
    return plain_pod(containers=[HOOK] * 45_000)


def _many_containers_and_a_long_name() -> Json:
    limited = [{"name": "c", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}] * 1000
    return plain_pod(containers=limited) | {"metadata": {"name": "n" * 500_000, "annotations": ASKS}}


def _many_disks() -> Json:
    return vmi(devices={"disks": [{}] * 600_000})


def _many_entries() -> Json:
    entries = f"[{'{},' * 500_000}{{}}]"
    return vmi({**ASKS, "hooks.kubevirt.io/hookSidecars": entries})


def _many_annotations() -> Json:
    return plain_pod({**ASKS, **{f"a{count}": "" for count in range(120_000)}})


@pytest.mark.parametrize(
    "make", [_many_hooks, _many_containers_and_a_long_name, _many_disks, _many_entries, _many_annotations]
)
def test_no_answer_is_much_larger_than_its_question(webhooks: Webhooks, make: Callable[[], Json]) -> None:
    raw = make()
    asked = question(raw).replace(b", ", b",").replace(b": ", b":")
    assert 500_000 < len(asked) < MAX_BODY_BYTES
    status, answer = webhooks.post(PATHS[raw["kind"]], asked)
    assert status == 200
    assert len(answer) < 2 * len(asked) + 10_000  # a patch is written as base64


@pytest.mark.parametrize("kind", ["Pod", "VirtualMachineInstance"])
def test_more_annotations_than_the_api_server_stores_are_refused(webhooks: Webhooks, kind: str) -> None:
    def status_with(note: str) -> Json:
        noted = {**ASKS, "note": note}
        made = {"Pod": plain_pod(noted), "VirtualMachineInstance": vmi(noted)}
        response = webhooks.ask(made[kind])
        return dict(response.get("status", {}))

    others = sum(len(key) + len(value) for key, value in ASKS.items()) + len("note")
    assert status_with("n" * (256 * 1024 - others - 1000)) == {}  # the request and the size are added
    refused = status_with("n" * (256 * 1024 - others + 1))
    assert refused["code"] == 400
    assert refused["message"].startswith(kind)
    assert refused["message"].endswith(
        ": its annotations are 262145 characters; at most 262144 can be stored"
    )


def test_a_pod_with_more_sizes_of_huge_pages_than_a_claim_can_have_is_refused(webhooks: Webhooks) -> None:
    def status_with(count: int) -> Json:
        pages = {f"hugepages-{size}Mi": "1Gi" for size in range(1, count + 1)}
        limits = {"cpu": "1", "memory": "1Gi", **pages}
        made = plain_pod(containers=[{"name": "c", "resources": {"limits": limits}}])
        return dict(webhooks.ask(made).get("status", {}))

    assert status_with(16) == {}
    refused = status_with(17)
    assert refused["code"] == 422
    assert (
        refused["message"]
        == "Pod default/solver: container c has a 17th size of huge pages; at most 16 count"
    )


def test_other_work_runs_between_any_two_reviews(webhooks: Webhooks) -> None:
    seen = webhooks.turns_of_reviews(question(vmi()), 20)
    assert len(seen) == 20
    assert len(set(seen)) == 20


def test_a_usual_review_does_not_wait_for_all_large_ones_that_came_before_it(webhooks: Webhooks) -> None:
    large = question(plain_pod({**ASKS, **{f"a{count}": "" for count in range(20_000)}}))
    assert webhooks.answered_before([large] * 20, question(plain_pod(ASKS))) < 7


def test_a_usual_review_does_not_wait_for_all_smaller_ones_that_come_after_it(webhooks: Webhooks) -> None:
    usual = question(plain_pod({**ASKS, "note": "n" * 30_000}))
    assert webhooks.answered_beside(question(plain_pod(ASKS)), 20, usual) < 200


def test_a_pod_that_waits_for_its_vmi_keeps_no_other_review_waiting(webhooks: Webhooks) -> None:
    raw = captured_pod(PODS / "virt-launcher-plain-hook-nonroot.pod.json")
    owner = raw["metadata"]["ownerReferences"][0]["name"]
    webhooks.vmis.stored["default", owner] = vmi_of(raw)
    answers = webhooks.answered_in_order([question(raw), question(plain_pod(None))])
    assert answers == [1, 0]
