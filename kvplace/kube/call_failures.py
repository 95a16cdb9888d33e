"""The program that did not answer, from errors in messages of API server, kube-scheduler and virt-controller.

Their messages name an address and a Go error. A person wants to know which program that is, and whether the
obstacle passes by itself.
"""

from __future__ import annotations

import re

_WEBHOOK = re.compile(r'failed calling webhook "(?P<name>[^"]+)": (?:failed to call webhook: )?(?P<cause>.+)')
_EXTENDER = re.compile(r'Post "[^"]*/v1/(?:filter|bind|preempt)": (?P<cause>.+)')
_ADDRESS = re.compile(r'^Post "[^"]*": ')
_OURS = ".kvplace.io"
_CERTIFICATE = ("x509:", "tls:")
_PASSING = re.compile(
    r"failed calling webhook|Internal error occurred|the object has been modified|etcdserver: |"
    r"[Tt]oo many requests|[Tt]imeout: |timed out|connection refused"
)


def unanswered(message: str) -> str:
    """State in one sentence which program did not answer, and where to check; empty where all did."""
    message = " ".join(message.split())
    if (found := _EXTENDER.search(message)) is not None:
        return _sentence("`kvplace serve`", "kube-scheduler", "", found["cause"])
    found = _WEBHOOK.search(message)
    if found is None:
        return ""
    name, cause = found["name"], _ADDRESS.sub("", found["cause"]).rstrip(")")
    if name.endswith(_OURS):
        return _sentence("`kvplace serve`", "the API server", f" (webhook {name})", cause)
    return f"webhook {name} does not answer the API server: {cause}"


def passes(message: str) -> bool:
    """Return whether an obstacle may pass by itself, as an outage does and a refusal does not."""
    return _PASSING.search(message) is not None


def _sentence(who: str, whom: str, at: str, cause: str) -> str:
    if any(word in cause for word in _CERTIFICATE):
        why = "`kubectl kvplace doctor` reports why"
        return f"{whom} does not accept the certificate of {who}{at}: {cause}; {why}"
    look = "`kubectl -n kvplace-system get pods` shows whether it runs"
    return f"{who} does not answer {whom}{at}: {cause}; {look}"
