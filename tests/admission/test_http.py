"""The webhook addresses as the API server calls them: questions, answers, and bodies that are neither."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from kvplace.core.well_known_names import ASKING, RESULTS
from tests.admission.reviewed_objects import (
    ASKS,
    Json,
    apply_patch,
    captured_pod,
    plain_pod,
    vm,
    vmi,
    vmi_of,
    written_request,
)
from tests.admission.webhooks import PATHS, Webhooks, patch_of, question
from tests.kubevirt_documents import PODS

# Answers


@pytest.mark.parametrize("raw", [vmi(None), vm(None), plain_pod(None)], ids=lambda raw: raw["kind"])
def test_an_object_without_options_is_allowed_without_a_patch(webhooks: Webhooks, raw: Json) -> None:
    assert webhooks.ask(raw) == {"uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "allowed": True}


def test_a_vmi_with_options_gets_the_sidecar_its_size_and_a_label(webhooks: Webhooks) -> None:
    webhooks.largest = 2
    response = webhooks.ask(vmi())
    assert sorted(operation["path"] for operation in patch_of(response)) == [
        "/metadata/annotations/hooks.kubevirt.io~1hookSidecars",
        "/metadata/annotations/kvplace.io~1vm-size",
        "/metadata/labels",
    ]
    assert response["allowed"] is True
    assert response["warnings"] == [
        "4 vCPUs are more than the allocatable CPUs of any known machine (largest: 2)",
    ]


def test_a_launcher_pod_gets_the_size_of_the_vmi_as_it_is_now(webhooks: Webhooks) -> None:
    raw = captured_pod(PODS / "virt-launcher-plain-hook-nonroot.pod.json")
    owner = raw["metadata"]["ownerReferences"][0]["name"]
    webhooks.vmis.stored["default", owner] = vmi_of(raw, cpu={"sockets": 3, "cores": 2})
    placed = apply_patch(raw, patch_of(webhooks.ask(raw)))
    assert written_request(placed).request.vcpus == 6


def test_a_plain_pod_needs_no_vmi(webhooks: Webhooks) -> None:
    webhooks.vmis.away = True
    placed = apply_patch(plain_pod(), patch_of(webhooks.ask(plain_pod())))
    assert written_request(placed).request.vcpus == 4


def test_a_refusal_has_one_sentence_and_status_422(webhooks: Webhooks) -> None:
    response = webhooks.ask(vm({"cpu-set": "near"}))
    assert response["allowed"] is False
    assert "patch" not in response
    assert response["status"].pop("message").startswith("annotation cpu-set: 'near': must be one of")
    assert response["status"] == {"status": "Failure", "code": 422, "reason": "Invalid"}


def _named(raw: Json) -> Json:
    raw["metadata"]["name"] = "n" * 500_000
    return raw


def _texts(record: logging.LogRecord) -> list[str]:
    return [record.getMessage(), *(value for value in vars(record).values() if isinstance(value, str))]


@pytest.mark.parametrize(
    "raw",
    [
        plain_pod(nodeName="n" * 500_000),
        _named(plain_pod({"cpu-set": "any"}, {"limits": {"cpu": "1500m"}})),
        _named(vm(cpu={"cores": 4, "dedicatedCpuPlacement": True})),
    ],
    ids=["node", "name of a pod", "name of a VM"],
)
def test_no_client_fills_the_log_with_a_word_that_the_api_server_has_not_checked_yet(
    webhooks: Webhooks, caplog: pytest.LogCaptureFixture, raw: Json
) -> None:
    with caplog.at_level("INFO", logger="kvplace.admission.http"):
        sentence = webhooks.ask(raw, name=raw["metadata"]["name"])["status"]["message"]
    (record,) = caplog.records
    assert max(map(len, [sentence, *_texts(record)])) < 2100


def test_reviews_are_counted_by_kind_and_decision(webhooks: Webhooks) -> None:
    def counted() -> list[float]:
        return [
            REGISTRY.get_sample_value(
                "kvplace_admission_review_seconds_count", {"kind": "VirtualMachine", "decision": decision}
            )
            or 0
            for decision in ("allowed", "denied", "malformed")
        ]

    before = counted()
    webhooks.ask(vm())
    webhooks.ask(vm({"cpu-set": "near"}))
    webhooks.post("/admit/vm", b"{}")
    assert counted() == [number + 1 for number in before]


def test_an_update_is_compared_with_the_object_before(webhooks: Webhooks) -> None:
    wrong = vm({"cpu-set": "near"})
    assert webhooks.ask(wrong, "UPDATE", vm())["allowed"] is False
    response = webhooks.ask(wrong, "UPDATE", wrong)
    assert response["allowed"] is True
    assert response["warnings"][0].startswith("annotation cpu-set: 'near'")


def test_a_vmi_that_is_gone_is_a_conflict_and_an_api_server_that_is_down_is_worth_another_try(
    webhooks: Webhooks,
) -> None:
    raw = captured_pod(PODS / "virt-launcher-plain-hook-nonroot.pod.json")
    status = webhooks.ask(raw)["status"]
    assert (status["code"], status["reason"]) == (409, "Conflict")
    webhooks.vmis.away = True
    status = webhooks.ask(raw)["status"]
    assert (status["code"], status["reason"]) == (503, "ServiceUnavailable")
    assert status["message"] == "the API server does not answer: connection refused"


# Bodies


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "the body is not an AdmissionReview of admission.k8s.io/v1: Input data was truncated"),
        (b"junk", "the body is not an AdmissionReview of admission.k8s.io/v1: JSON is malformed"),
        (b"null", "the body is not an AdmissionReview of admission.k8s.io/v1: Expected `object`, got `null`"),
        (b"\xff\xfe", "the body is not an AdmissionReview of admission.k8s.io/v1: "),
        (b"[" * 100_000, "the body is not an AdmissionReview of admission.k8s.io/v1: "),
        (
            b'{"apiVersion":"admission.k8s.io/v1beta1","kind":"AdmissionReview","request":{}}',
            (
                "the body is not an AdmissionReview of admission.k8s.io/v1: Invalid enum value "
                "'admission.k8s.io/v1beta1'"
            ),
        ),
        (
            b'{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}',
            "the body is not an AdmissionReview of admission.k8s.io/v1: Object missing required field `req",
        ),
        (
            question(plain_pod(), uid=5),
            (
                "the body is not an AdmissionReview of admission.k8s.io/v1: Expected `str`, got `int` - at "
                "`$.request.uid`"
            ),
        ),
        (question(vm()), "/admit/pod serves CREATE of Pod, not CREATE of VirtualMachine"),
        (
            question(plain_pod(), "DELETE"),
            "/admit/pod serves CREATE of Pod, not DELETE of Pod",
        ),
        (
            question(plain_pod(), subResource="binding"),
            "/admit/pod serves CREATE of Pod, not CREATE of Pod binding",
        ),
    ],
    ids=str,
)
def test_a_body_that_is_not_an_admission_review_gets_400_and_one_sentence(
    webhooks: Webhooks, body: bytes, sentence: str
) -> None:
    status, text = webhooks.post("/admit/pod", body)
    assert status == 400
    assert text.decode().startswith(sentence)
    assert text.decode().count("\n") == 1


@pytest.mark.parametrize("raw", [None, [], 5, "pod"])
def test_an_object_that_is_not_a_json_object_is_refused(webhooks: Webhooks, raw: Any) -> None:
    status, body = webhooks.post("/admit/pod", question(raw))
    response = json.loads(body)["response"]
    assert (status, response["allowed"], response["status"]["code"]) == (200, False, 400)
    assert response["status"]["message"].startswith("request.object must be a JSON object")


ODD_CONTAINER = {"name": "hook", "command": ["kvplace-hook"], "resources": {"limits": {"cpu": "1"}}}


@pytest.mark.parametrize(
    ("pod", "is_allowed"),
    [
        ({"spec": {"containers": []}}, True),
        *(
            (
                {"metadata": {"annotations": ASKS}, "spec": {"containers": [{**ODD_CONTAINER, field: odd}]}},
                False,
            )
            for field in ("env", "volumeMounts", "securityContext")
            for odd in (5, [5])
        ),
    ],
    ids=str,
)
def test_a_pod_that_no_api_server_would_send_gets_an_answer_too(
    webhooks: Webhooks, pod: Json, is_allowed: bool
) -> None:
    assert webhooks.ask({"kind": "Pod", **pod})["allowed"] is is_allowed


@pytest.mark.parametrize("depth", [400, 700])
def test_a_deeply_nested_object_is_answered(webhooks: Webhooks, depth: int) -> None:
    nested: Any = "x"
    for _ in range(depth):
        nested = [nested]
    for raw in (plain_pod(ASKS, extra=nested), plain_pod(None, extra=nested)):
        assert "allowed" in webhooks.ask(raw)


def test_a_body_that_is_nested_too_deeply_is_refused(webhooks: Webhooks) -> None:
    deep = question(plain_pod()).replace(b'"solver"', b"[" * 5000 + b"]" * 5000, 1)
    status, body = webhooks.post("/admit/pod", deep)
    assert status == 400 or json.loads(body)["response"]["allowed"] is False


anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
options = st.dictionaries(
    st.sampled_from((*ASKING, *RESULTS)), st.sampled_from(["one-numa", "none", "true", "share"]) | anything
)
objects: st.SearchStrategy[Json] = st.fixed_dictionaries(
    {"kind": st.sampled_from(list(PATHS))},
    optional={
        "metadata": anything | st.fixed_dictionaries({"annotations": options}, optional={"name": anything}),
        "spec": anything
        | st.fixed_dictionaries(
            {},
            optional={
                "containers": anything | st.lists(anything, max_size=2),
                "volumes": anything,
                "domain": anything | st.fixed_dictionaries({}, optional={"cpu": anything}),
                "template": st.fixed_dictionaries(
                    {}, optional={"metadata": st.fixed_dictionaries({"annotations": options})}
                ),
            },
        ),
    },
)


@given(objects, st.sampled_from(["CREATE", "UPDATE"]), anything)
def test_any_object_is_allowed_or_denied_with_a_reason(
    running: Webhooks, raw: Json, operation: str, old: Any
) -> None:
    status, body = running.post(PATHS[raw["kind"]], question(raw, operation, old))
    if status == 400:
        # Python writes NaN and infinity, which JSON does not know.
        refused = body.decode()
        assert refused.startswith(("the body is not an AdmissionReview", "/admit/")), refused
        return
    assert status == 200, body
    response = json.loads(body)["response"]
    if response["allowed"]:
        if "patch" in response:
            apply_patch(raw, patch_of(response))
    else:
        assert response["status"]["message"]
        assert response["status"]["code"] in {400, 409, 422, 503}


@given(st.sampled_from(list(PATHS.values())), st.binary(max_size=200))
def test_any_bytes_get_an_answer(running: Webhooks, path: str, body: bytes) -> None:
    assert running.post(path, body)[0] == 400
