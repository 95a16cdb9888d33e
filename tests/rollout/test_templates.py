"""Templates, documents and what is wrong with them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvplace.core.errors import Misconfigured
from kvplace.core.vm_stages import VmStage
from kvplace.documents.reading import read_manifests
from kvplace.rollout.templates import read_rollout, read_template, stored_rollout
from kvplace.simulate.demo_vms import read_templates
from tests.docs.blocks import block
from tests.docs.reading import PROJECT
from tests.rollout.examples import rollout, vm, vmi
from tests.rollout.memory_rollouts import NAMESPACE

Json = dict[str, Any]


def test_the_record_in_the_cluster_gives_the_same_rollout_again(tmp_path: Path) -> None:
    (tmp_path / "web.json").write_text(json.dumps(vm()))
    document = {
        "name": "web", "waves": [1, "10%"], "timeout": "2m", "until": "running", "maxInFlight": 3,
        "vms": [{"template": "web.json", "count": 3}, {"template": vmi(), "names": ["a", "b"]}],
    }  # fmt: skip
    first = read_rollout(document, NAMESPACE, folder=tmp_path)
    again = stored_rollout(first.text, NAMESPACE, "web")
    assert again.text == first.text
    assert [again.manifest(one) for one in again.vms] == [first.manifest(one) for one in first.vms]
    assert [one.name for one in again.vms] == ["web-01", "web-02", "web-03", "a", "b"]
    assert again.document.timeout == 120
    assert {one.goal for one in again.vms} == {VmStage.RUNNING}


@pytest.mark.parametrize("timeout", ["5000h", "9999999h", "9999999m", "9999999s", "90s", "30m"])
def test_a_timeout_of_any_length_can_be_read_again(timeout: str) -> None:
    first = rollout(timeout=timeout)
    again = stored_rollout(first.text, NAMESPACE, "web")
    assert (again.text, again.document.timeout) == (first.text, first.document.timeout)


def test_the_document_of_the_page_is_one() -> None:
    document = yaml.safe_load(block("docs/rollout.md", "name: shop"))
    shop = read_rollout(document, NAMESPACE, folder=PROJECT)
    assert [one.name for one in shop.vms][-3:] == ["web-100", "db-a", "db-b"]
    assert len(shop.vms) == 102


def test_a_vm_that_was_read_from_a_cluster_is_a_template() -> None:
    read = copy.deepcopy(vm())
    read["metadata"] |= {
        "uid": "1", "resourceVersion": "2", "finalizers": ["x"], "namespace": NAMESPACE,
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "team": "web"},
    }  # fmt: skip
    read["status"] = {"ready": True}
    made = rollout(1, template=read)
    manifest = made.manifest(made.vms[0])
    assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
    assert manifest["metadata"] == {
        "name": "web-01", "namespace": NAMESPACE, "annotations": {"team": "web"},
        "labels": {"app": "web", "kvplace.io/rollout": "web"},
    }  # fmt: skip
    assert read["spec"]["template"]["metadata"].get("labels") is None, "the template stays as it is"


@pytest.mark.parametrize("name", read_templates())
def test_every_template_of_the_project_can_be_rolled_out(name: str) -> None:
    made = rollout(2, template=read_templates()[name])
    assert made.vms[0].template.request is not None


def test_the_size_of_an_instancetype_is_not_known_before_it_is_made() -> None:
    template = vm()
    template["spec"]["instancetype"] = {"name": "large"}
    made = rollout(1, template=template)
    assert made.vms[0].template.request is None
    assert made.vms[0].goal is VmStage.PINNED


@pytest.mark.parametrize("has_instancetype", [False, True])
def test_a_template_may_state_null_where_it_has_no_metadata(*, has_instancetype: bool) -> None:
    template = vm()
    template["metadata"] = None
    if has_instancetype:
        template["spec"]["instancetype"] = {"name": "large"}
    made = rollout(1, template=template)
    assert (made.vms[0].template.request is None) is has_instancetype
    assert made.manifest(made.vms[0])["metadata"] == {
        "name": "web-01", "namespace": NAMESPACE, "labels": {"kvplace.io/rollout": "web"},
    }  # fmt: skip


@pytest.mark.parametrize("domain", [None, {}])
def test_a_vm_without_any_size_is_a_template_as_for_admission(domain: Json | None) -> None:
    template = vm()
    template["spec"]["template"]["spec"] = {"domain": domain} if domain is not None else {}
    (one,) = rollout(1, template=template).vms
    assert one.template.request is not None
    assert (one.template.request.vcpus, one.template.pod_memory) == (1, 0)


def without_spec(template: Json) -> None:
    del template["spec"]


def another_kind(template: Json) -> None:
    template["kind"] = "Deployment"


def misspelt_word(template: Json) -> None:
    template["spec"]["template"]["metadata"]["annotations"]["cpu-set"] = "one-soket"


def on_the_vm_itself(template: Json) -> None:
    template["metadata"]["annotations"] = template["spec"]["template"]["metadata"].pop("annotations")


def number_as_annotation(template: Json) -> None:
    template["spec"]["template"]["metadata"]["annotations"]["kvplace.io/explain"] = True


def template_of_text(template: Json) -> None:
    template["spec"]["template"] = "web"


def another_namespace(template: Json) -> None:
    template["metadata"]["namespace"] = "elsewhere"


def memory_of_words(template: Json) -> None:
    template["spec"]["template"]["spec"]["domain"]["resources"] = {"requests": {"memory": "much"}}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (memory_of_words, "spec.template.spec.domain.resources.requests.memory: 'much'"),
        (without_spec, "spec is missing"),
        (another_kind, "kind is 'Deployment'; it must be VirtualMachine or VirtualMachineInstance"),
        (misspelt_word, "did you mean 'one-socket'"),
        (on_the_vm_itself, "annotation cpu-set has no effect on the VM itself; move it to spec.template"),
        (number_as_annotation, "explain is true; it must be a string, so quote it"),
        (template_of_text, "spec: template is 'web'; it must be a mapping"),
        (
            another_namespace,
            "is of namespace elsewhere, and the VMs are to be made in default; give -n elsewhere",
        ),
    ],
)
def test_a_template_with_a_mistake_is_one_sentence(change: Callable[[Json], None], sentence: str) -> None:
    template = vm()
    change(template)
    with pytest.raises(Misconfigured) as refused:
        rollout(1, template=template)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({"name": "web", "vms": []}, "vms"),
        ({"name": "Web", "vms": [{"template": vm()}]}, "'Web' cannot be the name of a VM"),
        ({"name": "w" * 61, "vms": [{"template": vm(), "count": 10}]}, "has 64 characters; the name of a VM"),
        ({"name": "web", "vms": [{"template": vm()}, {"template": vm()}]}, "duplicate VM 'web'"),
        ({"name": "web", "vms": [{"template": vm(), "names": ["a", "a"]}]}, "duplicate VM 'a'"),
        ({"name": "web", "vms": [{"template": vm(), "names": ["a"], "count": 1}]}, "either count or names"),
        ({"name": "web", "vms": [{"template": "no-such.yaml"}]}, "no-such.yaml cannot be read"),
        ({"name": "web", "vms": [{"template": vm()}], "waves": [0]}, "0 is not a size of a wave"),
        (
            {"name": "web", "vms": [{"template": vm()}], "timeout": 90},
            "90 is not a duration; write for example 90s",
        ),
        ({"name": "web", "vms": [{"template": vm()}], "wave": [1]}, "did you mean 'waves'"),
    ],
)
def test_a_document_with_a_mistake_is_one_sentence(document: Json, sentence: str) -> None:
    with pytest.raises(Misconfigured) as refused:
        read_rollout(document, NAMESPACE)
    assert sentence in str(refused.value)


def test_a_document_that_no_config_map_holds_is_refused_by_its_bytes() -> None:
    document = {"name": "web", "vms": [{"template": vm(annotations={"motto": "é" * 600_000})}]}
    with pytest.raises(Misconfigured, match=r"rollout takes 1200\d\d\d bytes with its templates; divide it"):
        read_rollout(document, NAMESPACE)


@pytest.mark.parametrize("content", [None, 1, [], {"spec": {}}, {"kind": ["VirtualMachine"]}])
def test_whatever_a_file_holds_is_refused_in_words(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "template.json"
    path.write_text(json.dumps({"items": content}))
    with pytest.raises(Misconfigured):
        _ = [read_template(template, where) for where, template in read_manifests(str(path))]
