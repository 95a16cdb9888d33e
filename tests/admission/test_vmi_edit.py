"""Edits of a running VMI's options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvplace.admission.json_patch import difference
from kvplace.admission.vmi_edit import admit_vmi_edit
from kvplace.core.errors import KvplaceError
from kvplace.core.marks import EDITED_LABEL
from tests.admission.makers import ASKS, Json, vmi

MARK = {"op": "add", "path": "/metadata/labels", "value": {EDITED_LABEL: "true"}}


def edit(before: Mapping[str, str] | None, after: Mapping[str, str], **domain: Any) -> tuple[list[Json], str]:
    """Return the patch and the warnings for an edit of the annotations."""
    raw = vmi(after, **domain)
    admitted = admit_vmi_edit(raw, vmi(before, **domain), namespace="default")
    return difference(raw, admitted.object), "; ".join(admitted.warnings)


@pytest.mark.parametrize(
    "after",
    [
        {**ASKS, "kvplace.io/cpu-policy": "share"},
        {"cpu-set": "one-socket"},
        {**ASKS, "kvplace.io/cpu-policy": "none"},
        {**ASKS, "qos.gocrane.io/cpu-manager": "share"},
    ],
)
def test_an_edited_vmi_is_marked_so_that_the_controller_sees_it(after: dict[str, str]) -> None:
    assert edit(ASKS, after) == ([MARK], "")


def test_a_vmi_that_asked_to_run_unpinned_can_ask_for_cores() -> None:
    assert edit({"kvplace.io/cpu-policy": "none"}, ASKS) == ([MARK], "")


def test_an_edit_of_other_annotations_changes_nothing_even_if_the_options_are_bad() -> None:
    bad = {"cpu-set": "one-sockt", "kvplace.io/unknown": "x"}
    assert edit(bad, {**bad, "team": "a"}) == ([], "")


def test_options_for_a_vm_that_was_started_without_any_wait_for_its_next_start() -> None:
    patch, warning = edit(None, ASKS)
    assert patch == []
    assert "next start" in warning


def test_removed_options_leave_the_vm_where_it_is_and_say_how_to_unpin_it() -> None:
    patch, warning = edit(ASKS, {})
    assert patch == []
    assert "kvplace.io/cpu-policy: none" in warning


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ({"cpu-set": "one-sockt"}, "did you mean 'one-socket'"),
        ({**ASKS, "kvplace.io/cpu-polcy": "share"}, "did you mean kvplace.io/cpu-policy"),
        ({**ASKS, "kvplace.io/smt": "isolate", "kvplace.io/cpu-policy": "share"}, "isolate"),
    ],
)
def test_a_bad_edit_is_refused_with_one_sentence(after: dict[str, str], message: str) -> None:
    with pytest.raises(KvplaceError, match=message):
        edit(ASKS, after)


def test_an_edit_that_kubevirts_own_pinning_excludes_is_refused() -> None:
    with pytest.raises(KvplaceError, match="dedicatedCpuPlacement"):
        edit(
            {"kvplace.io/cpu-policy": "none"},
            ASKS,
            cpu={"sockets": 1, "cores": 4, "threads": 1, "dedicatedCpuPlacement": True},
        )
