"""Changes of a VMI that was created with options."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from kvplace.admission.vmi import admit_vmi, admit_vmi_edit
from kvplace.core.errors import KvplaceError
from kvplace.core.well_known_names import EDITED_LABEL, OPTED_IN_LABEL
from tests.admission.reviewed_objects import ASKS, SETTINGS, Json, unchanged_but_for, vmi

MARKED = {OPTED_IN_LABEL: "true", EDITED_LABEL: "true"}
SIZE = "kvplace.io/vm-size"


def created(annotations: Mapping[str, str], **domain: Any) -> Json:
    """Make a VMI as admission has left it."""
    return dict(admit_vmi(vmi(annotations, **domain), namespace="default", settings=SETTINGS).object)


def changed(old: Json, new: Json) -> tuple[Json, tuple[str, ...]]:
    """Return what is stored of a change, and the warnings."""
    admitted = admit_vmi_edit(new, old, namespace="default")
    return unchanged_but_for(new, admitted, copy.deepcopy(new)), admitted.warnings


def edit(before: Mapping[str, str], after: Mapping[str, str], **domain: Any) -> tuple[Json, str]:
    """Return the metadata after an edit of the options, and the warnings."""
    old = created(before, **domain)
    new = copy.deepcopy(old)
    kept = {key: value for key, value in new["metadata"]["annotations"].items() if key not in before}
    new["metadata"]["annotations"] = kept | dict(after)
    stored, warnings = changed(old, new)
    metadata: Json = stored["metadata"]
    return metadata, "; ".join(warnings)


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
    metadata, warnings = edit(ASKS, after)
    assert (metadata["labels"], warnings) == (MARKED, "")


def test_a_vmi_that_asked_to_run_unpinned_can_ask_for_cores() -> None:
    metadata, warnings = edit({"kvplace.io/cpu-policy": "none"}, ASKS)
    assert (metadata["labels"], warnings) == (MARKED, "")


def test_an_update_of_something_else_changes_nothing_even_if_the_options_are_bad() -> None:
    old = created(ASKS)
    old["metadata"]["annotations"] |= {"cpu-set": "one-sockt", "kvplace.io/unknown": "x"}
    new = copy.deepcopy(old)
    new["metadata"]["annotations"]["team"] = "a"
    assert changed(old, new) == (new, ())


def test_removed_options_leave_the_vm_where_it_is_and_state_how_to_unpin_it() -> None:
    metadata, warning = edit(ASKS, {})
    assert metadata["labels"] == {OPTED_IN_LABEL: "true"}
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


def test_cpus_that_are_plugged_in_change_the_size_for_the_next_pod() -> None:
    old = created(ASKS)
    new = copy.deepcopy(old)
    new["spec"]["domain"]["cpu"]["sockets"] = 2
    stored, _ = changed(old, new)
    assert stored["metadata"]["annotations"][SIZE] == '{"vcpus":8,"memory":4294967296}'
    assert stored["metadata"]["labels"] == {OPTED_IN_LABEL: "true"}


def test_a_size_that_kvplace_does_not_place_is_not_stated_and_stops_no_client() -> None:
    old = created(ASKS)
    new = copy.deepcopy(old)
    new["spec"]["domain"]["cpu"]["sockets"] = 5000
    stored, _ = changed(old, new)
    assert SIZE not in stored["metadata"]["annotations"]


@pytest.mark.parametrize("forged", [{"vcpus": 64}, None])
def test_neither_size_nor_label_can_be_changed_by_any_client(forged: Json | None) -> None:
    old = created(ASKS)
    new = copy.deepcopy(old)
    if forged is None:
        del new["metadata"]["annotations"][SIZE]
        del new["metadata"]["labels"]
    else:
        new["metadata"]["annotations"][SIZE] = '{"vcpus":64}'
    assert changed(old, new) == (old, ())
