"""Which CPUs each thread of a domain gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lxml import etree

from kvplace.core.cpuset import mask_of
from kvplace.core.errors import BadDomainXml
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import NO_CPUS, CpuId, CpuMask
from kvplace.domainxml import rewrite
from tests.domainxml.documents import domain, pins
from tests.domainxml.placements import FOUR_VCPUS, MANY_VCPUS, WHOLE_NODE
from tests.kubevirt_documents import DOMAINS


def test_every_vcpu_gets_its_cpu_and_the_emulator_its_set() -> None:
    assert pins(rewrite(domain("<vcpu>4</vcpu>"), FOUR_VCPUS)) == {
        "vcpu 0": "2",
        "vcpu 1": "34",
        "vcpu 2": "3",
        "vcpu 3": "35",
        "emulator": "0-1,32-33",
    }


def test_a_kubevirt_vm_of_four_with_twelve_more_pluggable_gets_its_four_cpus_and_the_rest_the_whole_set() -> (
    None
):
    xml = (DOMAINS / "01-amd64-plain-4vcpu.domain.xml").read_bytes()
    found = pins(rewrite(xml, FOUR_VCPUS))
    assert [found[f"vcpu {number}"] for number in range(4)] == ["2", "34", "3", "35"]
    assert {found[f"vcpu {number}"] for number in range(4, 16)} == {"2-3,34-35"}
    assert len(found) == 16 + 1


def test_without_a_list_current_is_the_number_of_enabled_vcpus() -> None:
    two = replace(FOUR_VCPUS, vcpus=(CpuId(2), CpuId(34)))
    assert pins(rewrite(domain("<vcpu current='2'>4</vcpu>"), two)) == {
        "vcpu 0": "2",
        "vcpu 1": "34",
        "vcpu 2": "2-3,34-35",
        "vcpu 3": "2-3,34-35",
        "emulator": "0-1,32-33",
    }


def test_a_comment_in_a_number_is_not_a_part_of_it() -> None:
    xml = domain("<vcpu><!-- of 64 -->1<?of it?>2</vcpu><iothreads>1<!-- for all disks --></iothreads>")
    vcpus = [f"vcpu {vcpu}" for vcpu in range(12)]
    assert list(pins(rewrite(xml, MANY_VCPUS))) == [*vcpus, "emulator", "io 1"]


def test_a_domain_without_a_vcpu_element_has_one() -> None:
    assert pins(rewrite(domain("<name>x</name>"), FOUR_VCPUS)) == {"vcpu 0": "2", "emulator": "0-1,32-33"}


def test_under_policy_numa_every_vcpu_may_use_the_whole_set() -> None:
    found = pins(rewrite(domain("<vcpu>3</vcpu>"), WHOLE_NODE))
    assert found == {"vcpu 0": "0-15", "vcpu 1": "0-15", "vcpu 2": "0-15", "emulator": "0-1,32-33"}


def test_a_placement_for_fewer_vcpus_than_are_enabled_is_refused_with_both_numbers() -> None:
    with pytest.raises(BadDomainXml, match=r"starts with 5 vCPUs .* has CPUs for 4: .* restart it"):
        rewrite(domain("<vcpu>5</vcpu>"), FOUR_VCPUS)


def test_an_enabled_vcpu_with_a_high_id_counts_as_beyond_the_placement() -> None:
    listed = "".join(
        f"<vcpu id='{number}' enabled='{'yes' if number in (0, 7) else 'no'}' hotpluggable='yes'/>"
        for number in range(8)
    )
    with pytest.raises(BadDomainXml, match="highest id 7"):
        rewrite(domain("<vcpu>8</vcpu>", f"<vcpus>{listed}</vcpus>"), FOUR_VCPUS)


def test_stale_pins_are_removed_and_other_tuning_stays_in_place() -> None:
    xml = domain(
        "<vcpu>1</vcpu><iothreads>1</iothreads><cputune><shares>7</shares><vcpupin vcpu='0' cpuset='9'/>",
        "<vcpupin vcpu='99' cpuset='9'/><emulatorpin cpuset='9'/><emulatorpin cpuset='8'/>",
        "<iothreadpin iothread='5' cpuset='9'/><vcpusched vcpus='0' scheduler='batch'/></cputune>",
    )
    cputune = etree.fromstring(rewrite(xml, FOUR_VCPUS)).find("cputune")
    assert cputune is not None
    assert [child.tag for child in cputune] == [
        "shares",
        "vcpupin",
        "emulatorpin",
        "iothreadpin",
        "vcpusched",
    ]


def test_pins_of_a_second_cputune_are_removed_as_well() -> None:
    xml = domain(
        "<vcpu>1</vcpu><cputune/><cputune><vcpupin vcpu='0' cpuset='9'/><shares>1</shares></cputune>"
    )
    answer = rewrite(xml, FOUR_VCPUS)
    assert pins(answer) == {"vcpu 0": "2", "emulator": "0-1,32-33"}
    assert etree.fromstring(answer).findtext("cputune[2]/shares") == "1"


def test_placement_auto_becomes_static_so_that_libvirt_keeps_the_pins() -> None:
    vcpu = etree.fromstring(rewrite(domain("<vcpu placement='auto' current='1'>2</vcpu>"), FOUR_VCPUS)).find(
        "vcpu"
    )
    assert vcpu is not None
    assert dict(vcpu.items()) == {"placement": "static", "current": "1"}


@pytest.mark.parametrize("emulator_cpus", [0, mask_of((0, 1))])
def test_an_unpinned_emulator_has_no_pin_and_a_stale_one_is_removed(emulator_cpus: int) -> None:
    unpinned = replace(FOUR_VCPUS, emulator_cpus=NO_CPUS)
    xml = rewrite(
        domain("<vcpu>1</vcpu><iothreads>1</iothreads>"),
        replace(unpinned, emulator_cpus=CpuMask(emulator_cpus)),
    )
    assert pins(rewrite(xml, unpinned)) == {"vcpu 0": "2"}


# I/O threads: a count, ids, or both; `<iothreads>` inside a driver means something else.

THREE_SETS = replace(FOUR_VCPUS, io_thread_cpus=(CpuMask(1), CpuMask(2), CpuMask(4)))


@pytest.mark.parametrize(
    ("lines", "ids"),
    [
        ("<iothreads>3</iothreads>", [1, 2, 3]),
        ("<iothreads>0</iothreads>", []),
        ("<iothreadids><iothread id='7'/><iothread id='4'/></iothreadids>", [4, 7]),
        ("<iothreads>1</iothreads><iothreadids><iothread id='4'/><iothread id='7'/></iothreadids>", [4, 7]),
        (
            "<iothreads>4</iothreads><iothreadids><iothread id='5'/><iothread id='6'/></iothreadids>",
            [1, 2, 5, 6],
        ),
        ("<iothreads>3</iothreads><iothreadids><iothread id='2'/></iothreadids>", [1, 2, 3]),
        ("<iothreads>1</iothreads><devices><disk><driver iothread='9'/></disk></devices>", [1]),
        ("<devices><disk><driver><iothreads><iothread id='9'/></iothreads></driver></disk></devices>", []),
    ],
)
def test_io_threads_that_exist_are_pinned_and_no_other(lines: str, ids: list[int]) -> None:
    found = pins(rewrite(domain("<vcpu>1</vcpu>", lines), FOUR_VCPUS))
    assert {name: cpus for name, cpus in found.items() if name.startswith("io ")} == {
        f"io {number}": "0-1,32-33" for number in ids
    }


def test_io_threads_take_the_sets_of_the_placement_in_turn() -> None:
    found = pins(rewrite(domain("<vcpu>1</vcpu><iothreads>4</iothreads>"), THREE_SETS))
    assert [found[f"io {number}"] for number in (1, 2, 3, 4)] == ["0", "1", "2", "0"]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("09-amd64-iothreads-shared", 2),
        ("11-amd64-iothreads-supplementalpool", 4),
        ("17-s390x-dedicated-iothreads", 2),
        ("01-amd64-plain-4vcpu", 0),
    ],
)
def test_both_of_kubevirts_ways_to_have_io_threads_are_counted_once(name: str, count: int) -> None:
    xml = (DOMAINS / f"{name}.domain.xml").read_bytes()
    found = pins(rewrite(xml, FOUR_VCPUS))
    assert sorted(key for key in found if key.startswith("io ")) == [
        f"io {number + 1}" for number in range(count)
    ]


def test_a_bare_cpu_map_pins_vcpus_in_socket_order_and_the_rest_to_all_of_it() -> None:
    placement = PodPlacement.of_cpu_map('{"socket1": ["5", "7"], "socket0": ["2", "34"]}')
    answer = rewrite(domain("<vcpu>4</vcpu><iothreads>1</iothreads>"), placement.placement)
    assert list(pins(answer).values()) == ["2", "34", "5", "7", "2,5,7,34", "2,5,7,34"]
    assert b"numatune" not in answer
