"""What the annotations can say and this version does not do."""

from __future__ import annotations

import pytest

from kvplace.core.annotations import read_wish
from kvplace.core.errors import BadAnnotation
from kvplace.core.offered import check_offered


@pytest.mark.parametrize(
    ("annotations", "sentence"),
    [
        (
            {"cpu-set": "spread-numa"},
            (
                "annotation cpu-set: 'spread-numa': is not offered by this version; offered are one-socket, "
                "one-numa, one-l3, any"
            ),
        ),
        (
            {"kvplace.io/cpu-set": "spread-sockets"},
            (
                "annotation kvplace.io/cpu-set: 'spread-sockets': is not offered by this version; offered "
                "are one-socket, one-numa, one-l3, any"
            ),
        ),
        (
            {"topology.crane.io/cpu-policy": "numa"},
            (
                "annotation topology.crane.io/cpu-policy: 'numa': is not offered by this version; offered "
                "are exclusive, share, immovable, none"
            ),
        ),
        (
            {"kvplace.io/guest-numa": "mirror"},
            "annotation kvplace.io/guest-numa: 'mirror': is not offered by this version; offered are off",
        ),
    ],
)
def test_what_is_not_offered_is_refused_with_the_key_that_was_written(
    annotations: dict[str, str], sentence: str
) -> None:
    wish = read_wish(annotations)
    assert wish is not None
    with pytest.raises(BadAnnotation) as refused:
        check_offered(wish, annotations)
    assert str(refused.value) == sentence


def test_without_the_annotations_the_error_names_the_key_of_kvplace() -> None:
    wish = read_wish({"cpu-set": "spread-numa"})
    assert wish is not None
    with pytest.raises(BadAnnotation, match=r"^annotation kvplace\.io/cpu-set: 'spread-numa'"):
        check_offered(wish)


@pytest.mark.parametrize("scope", ["one-socket", "one-numa", "one-l3", "any"])
@pytest.mark.parametrize("policy", ["exclusive", "share", "immovable", "none"])
def test_everything_else_passes(scope: str, policy: str) -> None:
    wish = read_wish({"cpu-set": scope, "kvplace.io/cpu-policy": policy})
    assert wish is not None
    check_offered(wish)


@pytest.mark.parametrize("policy", ["share", "immovable"])
def test_idle_siblings_are_for_exclusive_vms(policy: str) -> None:
    wish = read_wish({"kvplace.io/cpu-policy": policy, "kvplace.io/smt": "isolate"})
    assert wish is not None
    with pytest.raises(BadAnnotation, match=f"together with cpu-policy {policy}; offered are prefer"):
        check_offered(wish)
