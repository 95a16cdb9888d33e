"""A ledger during an upgrade, with CRD and policy in either order, and in an installation without the policy.

Earlier the schema in the CRD held the fields of claims, and there was no policy for them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from harness.control_plane.cluster import MERGE_PATCH, ControlPlane, Json, RequestRefused
from harness.install_page.checkout import EARLIER_CLAIM
from kvplace.core.ledger import Ledger, LedgerChange, claim_document, merge_patch, read_ledger
from kvplace.core.scalars import PodUid
from kvplace.kube.api_errors import OWNERSHIP_RULE
from kvplace.kube.custom_objects import ledger_record
from kvplace.kube.objects import RawObject
from tests.kube.conftest import ledger_json
from tests.kube.example_claims import claim
from tests.kube.worlds import LEDGERS_PATH
from tests.manifests.policies import refused

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
CRD = MANIFESTS / "crd" / "nodeledgers.yaml"
POLICY = MANIFESTS / "policy" / "ledger-claims.yaml"
PATH = f"{LEDGERS_PATH}/worker"
BINDING = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/ledger-claims.kvplace.io"


@pytest.fixture(scope="module")
def plane(kubernetes_programs: Path) -> Iterator[ControlPlane]:
    assert kubernetes_programs.is_dir()
    with ControlPlane() as running:
        yield running


def earlier_crd() -> Json:
    crd: Json = copy.deepcopy(yaml.safe_load(CRD.read_text()))
    (version,) = crd["spec"]["versions"]
    claims = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["claims"]
    del claims["x-kubernetes-preserve-unknown-fields"]
    claims["additionalProperties"] = EARLIER_CLAIM
    return crd


def apply(plane: ControlPlane, text: str) -> None:
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)


def install_crd(plane: ControlPlane, crd: Json, *, drops_unknown_fields: bool) -> None:
    """Apply the CRD and wait until its schema is the one that counts."""
    apply(plane, yaml.safe_dump(crd))
    plane.wait_for_crds("nodeledgers.kvplace.io")
    probe = {"owners": {}, "claims": {"A": {"namespace": "a", "pod": "a", "policy": "none", "probe": "x"}}}

    def is_in_force() -> bool:
        try:
            made = plane.request("POST", f"{LEDGERS_PATH}?dryRun=All", ledger_json("probe", probe))
        except RequestRefused:  # by the policy, which sees what the schema has not dropped
            return not drops_unknown_fields
        return ("probe" not in made["spec"]["claims"]["A"]) is drops_unknown_fields

    plane.server("kube-apiserver").wait_until(is_in_force, "the schema of the CRD")


def install_this_crd(plane: ControlPlane) -> None:
    install_crd(plane, yaml.safe_load(CRD.read_text()), drops_unknown_fields=False)


def problem(plane: ControlPlane) -> str:
    """The faults that kvplace finds in the ledger when it reads it."""
    document = msgspec.json.encode(plane.request("GET", PATH))
    return ledger_record(msgspec.json.decode(document, type=RawObject)).problem


def merge(plane: ControlPlane, spec: Any, query: str = "") -> Json:
    return plane.request("PATCH", f"{PATH}{query}", {"spec": spec}, content_type=MERGE_PATCH)


def stored(plane: ControlPlane) -> Ledger:
    return read_ledger(plane.request("GET", PATH)["spec"])


def change(plane: ControlPlane, made: LedgerChange) -> Ledger:
    """Write a change as kvplace does; returns what is stored then."""
    before = stored(plane)
    merge(plane, merge_patch(before, made))
    assert stored(plane) == before.after(made)
    return stored(plane)


def put_policy_in_force(plane: ControlPlane) -> None:
    apply(plane, POLICY.read_text())
    refused(lambda: merge(plane, {"claims": {"A": {"policy": "mine"}}}, "?dryRun=All"))


def remove_policy(plane: ControlPlane) -> None:
    """Install the CRD without the policy; returns when the API server checks no claims any more."""
    plane.kubectl("delete", "--ignore-not-found", "-f", str(POLICY))
    install_this_crd(plane)

    def is_gone() -> bool:
        nonsense = ledger_json("probe", {"owners": {}, "claims": {"A": {}}})
        try:
            plane.request("POST", f"{LEDGERS_PATH}?dryRun=All", nonsense)
        except RequestRefused:
            return False
        return True

    plane.server("kube-apiserver").wait_until(is_gone, "ledger without the policy")


@contextmanager
def ledger(plane: ControlPlane) -> Iterator[None]:
    """A ledger in which pod A owns the CPUs 1 and 2, with a field that later releases do not know."""
    spec = merge_patch(Ledger(), LedgerChange((claim("A", 1, 2),)))
    spec["claims"]["A"]["state"] = "bound"
    plane.request("POST", LEDGERS_PATH, ledger_json("worker", spec))
    try:
        yield
    finally:
        held = plane.request("GET", PATH)["spec"]
        merge(plane, {key: dict.fromkeys(held[key]) for key in ("owners", "claims")})
        plane.request("DELETE", PATH)


def refuses_another_owner(plane: ControlPlane) -> bool:
    with pytest.raises(RequestRefused) as refusal:
        merge(plane, merge_patch(Ledger(), LedgerChange((claim("B", 2, 3),))))
    return OWNERSHIP_RULE in str(refusal.value)


def use_ledger(plane: ControlPlane) -> None:
    """Claim, change the claim that is older than the schema, release; the rule holds all the time."""
    change(plane, LedgerChange((claim("C", 5, 6),)))
    change(plane, LedgerChange((claim("A", 1, 2, 7),)))
    assert refuses_another_owner(plane)
    change(plane, LedgerChange((claim("A", 1, 2),), (PodUid("C"),)))


@pytest.mark.parametrize("first", ["the CRD", "the policy"])
def test_a_ledger_of_an_earlier_release_is_used_whatever_is_upgraded_first(
    plane: ControlPlane, first: str
) -> None:
    remove_policy(plane)
    install_crd(plane, earlier_crd(), drops_unknown_fields=True)
    with ledger(plane):
        use_ledger(plane)
        for upgrade in (install_this_crd, put_policy_in_force)[:: 1 if first == "the CRD" else -1]:
            upgrade(plane)
            use_ledger(plane)
        assert plane.request("GET", PATH)["spec"]["claims"]["A"]["state"] == "bound"


NONSENSE = {
    "no object": "nonsense",
    "nothing": {},
    "a list of CPUs": {**claim_document(claim("N")), "cpus": ["1"]},
    "CPUs in words": {**claim_document(claim("N")), "cpus": "one"},
    "memory in words": {**claim_document(claim("N")), "memory": "much"},
    "pages in words": {**claim_document(claim("N")), "hugePages": {"0": "many"}},
    "a revision in words": {**claim_document(claim("N")), "revision": "two"},
    "no policy": {**claim_document(claim("N")), "policy": "mine"},
    "next without a placement": {**claim_document(claim("N")), "next": {"previous": "x"}},
    "reserved as a text": {**claim_document(claim("N")), "reserved": "yes"},
}


def test_without_the_policy_nonsense_is_stored_and_read_as_damaged(plane: ControlPlane) -> None:
    remove_policy(plane)
    with ledger(plane):
        for nonsense in NONSENSE.values():
            merge(plane, {"claims": {"N": None}})
            merge(plane, {"claims": {"N": nonsense}})
            assert "claim of pod N" in problem(plane)
            assert refuses_another_owner(plane)
        put_policy_in_force(plane)
        merge(plane, {"claims": {"N": None}})
        assert not problem(plane)
