"""The API server itself refuses wrong writes of a ledger, by any writer, without kvplace's code."""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import yaml

from harness.control_plane.cluster import MERGE_PATCH, SERVER_SIDE_APPLY, ControlPlane, RequestRefused
from kvplace.core.cpuset import mask_of
from kvplace.core.ledger import Ledger, LedgerChange, Relocation, Reserved, claim_document, read_ledger
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import Bytes, NumaId
from kvplace.kube.api_errors import OWNERSHIP_RULE
from tests.kube.conftest import MANIFESTS, ledger_json
from tests.kube.example_claims import claim
from tests.kube.worlds import LEDGERS_PATH

JSON_PATCH = "application/json-patch+json"
Json = dict[str, Any]


PLACED = PodPlacement.of_cpu_map('{"socket0": ["5"]}')
EVERYTHING = claim(
    "B",
    5,
    vmi="db",
    huge_pages={NumaId(0): {Bytes(1 << 30): 1}},
    revision=2,
    relocation=Relocation(PLACED, PLACED),
    reserved=Reserved(mask_of([1, 5]), "2026-01-02T03:04:05Z", "kvplace-db-3f9a1c"),
)
"""A claim with every field."""


class Foreigner:
    """A user with every right and no manners."""

    def __init__(self, plane: ControlPlane, name: str) -> None:
        self.plane = plane
        self.name = name
        self.path = f"{LEDGERS_PATH}/{name}"

    def read(self) -> Json:
        return self.plane.request("GET", self.path)

    def owners(self) -> dict[str, str]:
        owners: dict[str, str] = self.read()["spec"]["owners"]
        return owners

    def merge(self, spec: Any) -> Json:
        return self.plane.request("PATCH", self.path, {"spec": spec}, content_type=MERGE_PATCH)

    def put(self, spec: Any) -> Json:
        document = self.read()
        return self.plane.request("PUT", self.path, {**document, "spec": spec})

    def apply(self, spec: Any) -> Json:
        path = f"{self.path}?fieldManager=foreigner&force=true"
        return self.plane.request("PATCH", path, ledger_json(self.name, spec), content_type=SERVER_SIDE_APPLY)


@pytest.fixture
def ledger(ledger_server: ControlPlane) -> Iterator[Foreigner]:
    """A ledger in which pod A owns the CPUs 1 and 2."""
    foreigner = Foreigner(ledger_server, f"worker-{secrets.token_hex(4)}")
    ledger_server.request("POST", LEDGERS_PATH, ledger_json(foreigner.name, spec(A={1, 2})))
    yield foreigner
    if any(item["metadata"]["name"] == foreigner.name for item in _all(ledger_server)):
        held = foreigner.read()["spec"]
        foreigner.merge({key: dict.fromkeys(held[key]) for key in ("owners", "claims")})
        ledger_server.request("DELETE", foreigner.path)


def _all(plane: ControlPlane) -> list[Json]:
    items: list[Json] = plane.request("GET", LEDGERS_PATH)["items"]
    return items


def spec(**pods: set[int]) -> Json:
    """The spec of a ledger in which each pod owns these CPUs."""
    ledger = Ledger().after(LedgerChange(tuple(claim(uid, *sorted(cpus)) for uid, cpus in pods.items())))
    return {
        "owners": {str(cpu): owner for cpu, owner in ledger.owners.items()},
        "claims": {uid: claim_document(entry) for uid, entry in ledger.claims.items()},
    }


def refusal(write: Any, *arguments: Any) -> str:
    """The API server's report about an invalid write."""
    with pytest.raises(RequestRefused) as refused:
        write(*arguments)
    assert refused.value.status == 422, refused.value
    return str(refused.value)


def test_a_cpu_does_not_go_from_a_to_b_by_merge_patch(ledger: Foreigner) -> None:
    assert OWNERSHIP_RULE in refusal(ledger.merge, spec(B={2, 3}))
    assert ledger.owners() == {"1": "A", "2": "A"}


def test_a_cpu_does_not_go_from_a_to_b_by_put(ledger: Foreigner) -> None:
    assert OWNERSHIP_RULE in refusal(ledger.put, spec(B={2, 3}))
    assert OWNERSHIP_RULE in refusal(ledger.put, spec(A={1}, B={2}))
    assert ledger.owners() == {"1": "A", "2": "A"}


def test_a_cpu_does_not_go_from_a_to_b_by_a_forced_apply(ledger: Foreigner) -> None:
    assert OWNERSHIP_RULE in refusal(ledger.apply, spec(B={2, 3}))
    assert ledger.owners() == {"1": "A", "2": "A"}


def test_a_cpu_does_not_go_from_a_to_b_by_json_patch(ledger: Foreigner) -> None:
    swap = [
        {"op": "remove", "path": "/spec/owners/2"},
        {"op": "add", "path": "/spec/claims/B", "value": spec(B={2})["claims"]["B"]},
        {"op": "add", "path": "/spec/owners/2", "value": "B"},
    ]
    said = refusal(
        lambda: ledger.plane.request("PATCH", ledger.path, swap, content_type=JSON_PATCH)  # type: ignore[arg-type]
    )
    assert OWNERSHIP_RULE in said


@pytest.mark.parametrize(
    "trick",
    [{"owners": None}, None, {"owners": None, "claims": None}, {"claims": None}],
    ids=["owners", "spec", "both", "claims"],
)
def test_null_does_not_make_the_server_forget(ledger: Foreigner, trick: Any) -> None:
    refusal(ledger.merge, trick)
    assert ledger.owners() == {"1": "A", "2": "A"}


@pytest.mark.parametrize("missing", ["owners", "claims"])
def test_a_ledger_cannot_be_stored_without_a_part(ledger: Foreigner, missing: str) -> None:
    whole = spec(A={1, 2})
    del whole[missing]
    refusal(ledger.put, whole)
    refusal(ledger.put, {**whole, missing: None})


def test_every_owner_has_a_claim(ledger: Foreigner) -> None:
    assert "must have a claim" in refusal(ledger.merge, {"owners": {"3": "nobody"}})
    assert "must have a claim" in refusal(ledger.merge, {"claims": {"A": None}})


@pytest.mark.parametrize("key", ["two", "-1", "007", "1-3", "100000", " 1", ""])
def test_only_cpu_ids_have_owners(ledger: Foreigner, key: str) -> None:
    assert "CPU ids" in refusal(ledger.merge, {"owners": {key: "A"}})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", "mine"),
        ("policy", None),
        ("namespace", ""),
        ("namespace", "n" * 64),
        ("namespace", 5),
        ("vmi", ["db"]),
        ("vmi", "v" * 254),
        ("state", "bound"),
        ("revision", "two"),
        ("revision", 1),
        ("revision", 1 << 31),
        ("revision", 2.5),
        ("cpus", ["1"]),
        ("cpus", "1," * 32768 + "1"),
        ("cpus", "1-"),
        ("cpus", "one"),
        ("owned", "0x3"),
        ("memory", {"0": "much"}),
        ("memory", {"0": -1}),
        ("memory", {"0": 1.5}),
        ("memory", [1]),
        ("memory", {str(node): 1 for node in range(1025)}),
        ("hugePages", {"0": {"1Gi": -1}}),
        ("hugePages", {"0": 4}),
        ("hugePages", "many"),
        ("hugePages", {"0": {f"{size}Ki": 1 for size in range(17)}}),
        ("since", "yesterday"),
        ("since", 1767225600),
        ("pod", ""),
        ("pod", None),
        ("next", {}),
        ("next", {"previous": "{}"}),
        ("next", {"placement": 1}),
        ("next", {"placement": "{}", "after": "{}"}),
        ("next", "{}"),
        ("reserved", {"owned": "1"}),
        ("reserved", {"until": "2026-01-02T03:04:05Z"}),
        ("reserved", {"owned": "one", "until": "2026-01-02T03:04:05Z"}),
        ("reserved", {"owned": "1", "until": "soon"}),
        ("reserved", {"owned": "1", "until": "2026-01-02T03:04:05Z", "for": "b"}),
        ("reserved", {"owned": "1", "until": "2026-01-02T03:04:05Z", "migration": "Not A Name"}),
        ("reserved", {"owned": "1", "until": "2026-01-02T03:04:05Z", "migration": ""}),
        ("reserved", "yes"),
    ],
)
def test_a_claim_that_no_reader_understands_is_not_stored(
    ledger: Foreigner, field: str, value: object
) -> None:
    said = refusal(ledger.merge, {"claims": {"A": {field: value}}})
    assert "denied request: spec.claims: " in said
    other = {**claim_document(claim("B")), field: value}
    assert "denied request: spec.claims: " in refusal(
        ledger.merge, {"claims": {"B": {**other, "pod": value}}}
    )


@pytest.mark.parametrize("value", ["A", 1, [], True, {}])
def test_a_claim_is_an_object_with_a_pod(ledger: Foreigner, value: object) -> None:
    assert "denied request: spec.claims: " in refusal(ledger.merge, {"claims": {"B": value}})


@pytest.mark.parametrize("value", ["A", 1, [], {str(number): {} for number in range(1025)}], ids=type)
def test_claims_are_an_object_of_at_most_1024(ledger: Foreigner, value: object) -> None:
    refusal(ledger.merge, {"claims": value})


def test_a_claim_with_every_field_is_stored_as_it_is(ledger: Foreigner) -> None:
    stored = ledger.merge({"owners": {"5": "B"}, "claims": {"B": claim_document(EVERYTHING)}})
    assert stored["spec"]["claims"]["B"] == claim_document(EVERYTHING)
    assert read_ledger(stored["spec"]).claims[EVERYTHING.uid] == EVERYTHING


def test_policy_and_crd_know_every_field_of_a_claim() -> None:
    known = claim_document(EVERYTHING).keys()
    policy, _ = yaml.safe_load_all((MANIFESTS / "policy" / "ledger-claims.yaml").read_text())
    (listed,) = (one["expression"] for one in policy["spec"]["variables"] if one["name"] == "fields")
    assert set(re.findall(r"'(\w+)'", listed)) == known
    crd = yaml.safe_load((MANIFESTS / "crd" / "nodeledgers.yaml").read_text())
    (version,) = crd["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    described = re.findall(r"^(\w+(?:, \w+)*): ", spec["claims"]["description"], flags=re.MULTILINE)
    assert {name for names in described for name in names.split(", ")} == known


def test_the_same_claim_again_changes_nothing(ledger: Foreigner) -> None:
    before = ledger.read()["metadata"]["resourceVersion"]
    assert ledger.merge(spec(A={1, 2}))["metadata"]["resourceVersion"] == before


def test_a_released_cpu_finds_a_new_owner(ledger: Foreigner) -> None:
    ledger.merge({"owners": {"1": None, "2": None}, "claims": {"A": None}})
    ledger.merge(spec(B={2, 3}))
    assert ledger.owners() == {"2": "B", "3": "B"}


def test_a_ledger_that_has_owners_cannot_be_deleted_by_any_client(ledger: Foreigner) -> None:
    zone = {"gracePeriodSeconds": 0, "propagationPolicy": "Orphan"}
    for body in (None, zone):
        assert "still has owners" in refusal(
            lambda body=body: ledger.plane.request("DELETE", ledger.path, body)
        )
    collection = f"{LEDGERS_PATH}?fieldSelector=metadata.name%3D{ledger.name}"
    assert "still has owners" in refusal(lambda: ledger.plane.request("DELETE", collection))
    ledger.merge({"owners": {"1": None, "2": None}, "claims": {"A": None}})
    ledger.plane.request("DELETE", ledger.path)


def test_of_eight_writers_without_any_care_no_two_win_the_same_cpu(ledger: Foreigner) -> None:
    """Each takes random CPUs of 64 without reading first and without a resource version."""

    def grab(number: int) -> list[dict[str, str]]:
        chance = random.Random(number)
        taken = []
        for attempt in range(12):
            uid = f"pod-{number}-{attempt}"
            wish = spec(**{uid: set(chance.sample(range(3, 67), 4))})
            try:
                ledger.merge(wish)
            except RequestRefused as refused:
                # 409: the API server itself gave up after five rounds against the others.
                if refused.status != 409 and OWNERSHIP_RULE not in str(refused):
                    raise
                continue
            taken.append(wish["owners"])
        return taken

    with ThreadPoolExecutor(8) as threads:
        won = [owners for writer in threads.map(grab, range(8)) for owners in writer]
    stored = ledger.read()["spec"]
    assert len(won) > 1
    assert sum(map(len, won)) == len({cpu for owners in won for cpu in owners})
    assert stored["owners"] == {"1": "A", "2": "A"} | {
        cpu: uid for owners in won for cpu, uid in owners.items()
    }
    read_ledger(stored).check()


def test_the_largest_ledger_that_the_schema_allows_can_be_written(ledger: Foreigner) -> None:
    """The rules have a budget of steps at run time, and a machine of 4096 CPUs must not use it up."""
    full = spec(
        **{f"00000000-0000-0000-0000-{pod:012d}": set(range(pod * 4, pod * 4 + 4)) for pod in range(1024)}
    )
    ledger.merge({"owners": {"1": None, "2": None}, "claims": {"A": None}})
    ledger.put(full)
    last = f"00000000-0000-0000-0000-{1023:012d}"
    ledger.merge({"owners": {"4095": None}, "claims": {last: {"cpus": "4092-4094", "owned": "4092-4094"}}})
    assert OWNERSHIP_RULE in refusal(ledger.merge, {"owners": {"0": last}})
