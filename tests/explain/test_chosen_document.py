"""Which object is explained: of the cluster, or of a file."""

from __future__ import annotations

import pytest

from kvplace.core.errors import BadBody
from kvplace.explain.reading import ExplainedObject, TargetKind, choose_document, read_target
from tests.admission.reviewed_objects import vm


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("db", TargetKind.VM, "db"),
        ("vm/db", TargetKind.VM, "db"),
        ("VirtualMachine/db", TargetKind.VM, "db"),
        ("vmi/db", TargetKind.VMI, "db"),
        ("virtualmachineinstances.kubevirt.io/db", TargetKind.VMI, "db"),
        ("pod/db", TargetKind.POD, "db"),
    ],
)
def test_a_target_is_written_as_kubectl_writes_it(text: str, kind: TargetKind, name: str) -> None:
    assert read_target(text, "team") == ExplainedObject(kind, "team", name)


@pytest.mark.parametrize("text", ["", "vm/", "node/worker", "vm/a/b", "vm/a=b", "vm/a,b", "pod/..", "a b"])
def test_another_target_is_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(BadBody, match="write vm/NAME, vmi/NAME or pod/NAME"):
        read_target(text, "default")


def test_of_a_file_with_one_vm_among_other_objects_the_vm_is_explained() -> None:
    assert choose_document([{"kind": "Service"}, vm()], "", "all.yaml") == vm()


def test_of_a_file_with_several_vms_the_named_one_is_explained() -> None:
    other = {**vm(), "metadata": {"name": "other"}}
    assert choose_document([vm(), other], "vm/other", "all.yaml") == other
    with pytest.raises(BadBody, match=r"all.yaml contains 2 VMs: vm/db, vm/other; name one of them"):
        choose_document([vm(), other], "", "all.yaml")
    with pytest.raises(BadBody, match=r"does not contain vm/third; it contains vm/db, vm/other"):
        choose_document([vm(), other], "vm/third", "all.yaml")


def test_of_vms_that_share_a_name_none_is_explained_in_place_of_the_other() -> None:
    one, other = ({**vm(), "metadata": {"name": "db", "namespace": team}} for team in ("red", "blue"))
    with pytest.raises(BadBody, match=r"all.yaml contains vm/db 2 times; give a file with one of them"):
        choose_document([one, other], "", "all.yaml")
    with pytest.raises(BadBody, match=r"all.yaml contains vm/db 2 times; give a file with one of them"):
        choose_document([one, other], "vm/db", "all.yaml")
    with pytest.raises(BadBody, match=r"contains vm/\(no name\) 2 times"):
        choose_document([{**vm(), "metadata": {}}, {**vm(), "metadata": {}}], "", "all.yaml")
    third = {**vm(), "metadata": {"name": "third"}}
    assert choose_document([one, other, third], "vm/third", "all.yaml") == third


def test_a_file_without_any_vm_is_refused() -> None:
    with pytest.raises(BadBody, match="contains no VirtualMachine"):
        choose_document([{"kind": "Service"}, {"kind": "Secret"}], "", "all.yaml")


@pytest.mark.parametrize("metadata", [["a"], "db", 7])
def test_metadata_that_is_not_a_mapping_is_reported_in_a_sentence(metadata: object) -> None:
    with pytest.raises(BadBody, match=r"all\.yaml: metadata is .*; it must be a mapping"):
        choose_document([{**vm(), "metadata": metadata}], "", "all.yaml")


@pytest.mark.parametrize("kind", [["Pod"], {"Pod": 1}, 7, None])
def test_a_kind_that_is_not_a_word_is_not_a_vm(kind: object) -> None:
    with pytest.raises(BadBody, match="contains no VirtualMachine"):
        choose_document([{**vm(), "kind": kind}], "", "all.yaml")
