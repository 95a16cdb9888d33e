"""Foreign messages about an outage become a sentence that names the program that does not answer."""

from __future__ import annotations

import pytest

from kvplace.kube.api_errors import passes, unanswered

LOOK = "`kubectl -n kvplace-system get pods` shows whether it runs"
FAILED = 'Internal error occurred: failed calling webhook "%s": failed to call webhook: '
EXPIRED = "x509: certificate has expired or is not yet valid: current time ... is after ..."
POST = 'Post "https://kvplace-serve.kvplace-system.svc:443/admit/vmi?timeout=10s": '


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (
            f"{FAILED % 'vmi.kvplace.io'}{POST}dial tcp 10.1.2.3:443: connect: connection refused",
            (
                "`kvplace serve` does not answer the API server (webhook vmi.kvplace.io): "
                f"dial tcp 10.1.2.3:443: connect: connection refused; {LOOK}"
            ),
        ),
        (
            f"{FAILED % 'pod.kvplace.io'}{POST}tls: failed to verify certificate: {EXPIRED}",
            (
                "the API server does not accept the certificate of `kvplace serve` (webhook pod.kvplace.io): "
                f"tls: failed to verify certificate: {EXPIRED}; `kubectl kvplace doctor` reports why"
            ),
        ),
        (
            f"patch vms: HTTP 500 ({FAILED % 'v.example.org'}no endpoints available for service v)",
            "webhook v.example.org does not answer the API server: no endpoints available for service v",
        ),
        (
            'running Filter on extender: Post "https://kvplace-extender:9443/v1/filter": EOF',
            f"`kvplace serve` does not answer kube-scheduler: EOF; {LOOK}",
        ),
    ],
)
def test_an_outage_is_reported_with_who_does_not_answer_and_where_to_check(
    message: str, sentence: str
) -> None:
    assert unanswered(message) == sentence


@pytest.mark.parametrize(
    ("message", "may_pass"),
    [
        ('Internal error occurred: failed calling webhook "vm.kvplace.io": EOF', True),
        ('Operation cannot be fulfilled on resourcequotas "q": the object has been modified', True),
        ('pods "virt-launcher-a" is forbidden: exceeded quota: q, requested: count/pods=1', False),
        ('admission webhook "v.example.org" denied the request: no', False),
    ],
)
def test_an_outage_passes_and_a_refusal_does_not(message: str, may_pass: bool) -> None:
    assert passes(message) is may_pass


def test_a_refusal_is_not_an_outage() -> None:
    assert unanswered('admission webhook "vm.kvplace.io" denied the request: cpu-set is one of ...') == ""
