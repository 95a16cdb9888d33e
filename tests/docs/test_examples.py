"""Each value has the effect on the domain that the page shows."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from lxml import etree

from kvplace.core import well_known_names as keys
from kvplace.core.allocator.allocate import place
from kvplace.core.annotations import read_options
from kvplace.core.cpuset import mask_of, parse_cpu_list
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import OnFailure, PinningOptions, Request
from kvplace.core.scalars import Bytes, NodeName, PodUid
from kvplace.domainxml import rewrite
from tests.core.machines import make_numa_node, make_package, make_topology
from tests.docs.blocks import block
from tests.docs.reading import WORDS, in_code_marks, page, section

GIB = Bytes(1 << 30)
FIRST, SECOND = parse_cpu_list("0-15,32-47"), parse_cpu_list("16-31,48-63")
MACHINE = make_topology(
    packages=(make_package(0, FIRST), make_package(1, SECOND)),
    numa_nodes=(
        make_numa_node(0, FIRST, 64 * GIB, distances={0: 10, 1: 21}),
        make_numa_node(1, SECOND, 64 * GIB, distances={0: 21, 1: 10}),
    ),
    l3_groups=(FIRST, SECOND),
    cores=tuple(mask_of((cpu, cpu + 32)) for cpu in range(32)),
    reserved=mask_of((0, 16, 32, 48)),
)


def domain_of(wish: dict[str, str], vcpus: int, gibibytes: int) -> etree._Element:
    """The domain of a VM of the page, by the allocator and the hook's rewriting."""
    request = wish if any(key in keys.OPTING_IN for key in wish) else {keys.CPU_SET: "one-socket", **wish}
    options = read_options(request) or PinningOptions()
    size = Request(vcpus, options, memory=gibibytes * GIB)
    answer = place(MACHINE, free_of(MACHINE, Ledger()), size)
    assert isinstance(answer, Placement), answer
    bound = PodPlacement(
        pod_uid=PodUid(""), node=NodeName(""), topology="", on_failure=OnFailure.WAIT, placement=answer
    )
    xml = f"<domain><memory unit='GiB'>{gibibytes}</memory><vcpu>{vcpus}</vcpu></domain>"
    return etree.fromstring(rewrite(xml.encode(), bound.placement))


def elements(root: etree._Element) -> set[str]:
    return {etree.tostring(element, with_tail=False).decode() for element in root.iter()}


def examples() -> Iterator[tuple[str, str, str]]:
    """Key, value and example of every value that has one."""
    below = section(page("annotations.md"), "Values of each annotation")
    for key in WORDS:
        for line in section(below, f"`{key}`").splitlines():
            cells = line.split("|")
            if line.startswith("| `") and len(cells) == 5:
                yield key, cells[1].strip(" `"), cells[3].strip()


EXAMPLES = list(examples())
RECIPES = [
    dict(mark.split(": ") for mark in re.findall(r"`([^`]+)`", line.split("|")[2]))
    for line in section(page("annotations.md"), "Recipes").splitlines()
    if line.startswith("| ") and "`" in line
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: " ".join(recipe.values()))
def test_a_recipe_opts_in_and_its_vm_is_pinned(recipe: dict[str, str]) -> None:
    assert read_options(recipe) is not None
    vcpus, gibibytes = (40, 96) if recipe["cpu-set"].startswith("spread") else (4, 8)
    assert domain_of(recipe, vcpus, gibibytes).findall(".//vcpupin")


def test_there_are_eight_recipes() -> None:
    assert len(RECIPES) == 8


def test_every_value_that_shows_in_the_domain_has_an_example() -> None:
    shown = [key for key in WORDS if key not in (keys.DEVICE_NUMA, keys.ON_FAILURE)]
    assert {key for key, _, _ in EXAMPLES} == set(shown)
    assert sum("<" in example for _, _, example in EXAMPLES) >= 15


@pytest.mark.parametrize(("key", "value", "example"), EXAMPLES, ids=lambda text: text[:20])
def test_an_example_is_the_real_result(key: str, value: str, example: str) -> None:
    quoted = {text for text in in_code_marks(example) if text.startswith("<")}
    if example == "no `<numatune>`":
        assert domain_of({key: value}, 4, 8).find("numatune") is None
        return
    parts = re.split(r"; (?=3 vCPUs)", example)
    for part in parts:
        vcpus, gibibytes = (40, 96) if "large" in part else (3, 8) if "3 vCPUs" in part else (4, 8)
        wish = {key: value} if vcpus < 40 or key == keys.CPU_SET else {key: value, "cpu-set": "spread-numa"}
        if value == "none":
            continue
        found = elements(domain_of(wish, vcpus, gibibytes))
        assert quoted & in_code_marks(part) <= found


def test_the_guest_that_is_shown_in_full_comes_out_in_full() -> None:
    shown_xml = block("docs/annotations.md", "<topology sockets=")
    root = domain_of({"cpu-set": "spread-numa", keys.GUEST_NUMA: "mirror"}, 40, 96)
    (cpu,) = root.iterfind("cpu")
    shown = etree.fromstring(f"<cpu>{shown_xml}</cpu>", etree.XMLParser(remove_blank_text=True))
    assert etree.tostring(cpu, method="c14n") == etree.tostring(shown, method="c14n")
