"""The SVG map: every thread once, nested as the machine is, readable without colour, and harmless."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplace.core.claim_changes import reserve
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.drawing.core_map import CoreMap, ThreadState, draw
from kvplace.core.drawing.svg_blocks import shortened, text_width
from kvplace.core.drawing.svg_map import svg_map
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement
from kvplace.core.request import PinningOptions, Policy, Request, Scope, Smt
from kvplace.core.scalars import NO_CPUS, CpuId, CpuMask, NumaId, PodUid
from kvplace.core.topology import Topology
from kvplace.machines.server_types import machine_names, read_machine
from tests.captured import CAPTURED_MACHINES, recorded_machine
from tests.core.example_ledgers import claim, ledger_of, with_vm
from tests.core.machines import make_numa_node, make_package, make_topology, topologies
from tests.profiles import examples

SVG = "{http://www.w3.org/2000/svg}"
NAMES = st.text(min_size=1, max_size=12)


def parsed(drawing: CoreMap) -> ET.Element:
    return ET.fromstring(svg_map(drawing))


def threads(root: ET.Element) -> list[ET.Element]:
    return [group for group in root.iter(f"{SVG}g") if "data-cpu" in group.attrib]


def cpus_below(group: ET.Element) -> int:
    return mask_of(int(thread.attrib["data-cpu"]) for thread in threads(group))


def groups(root: ET.Element, level: str) -> list[ET.Element]:
    return [group for group in root.iter(f"{SVG}g") if f"data-{level}" in group.attrib]


def frame(group: ET.Element) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a box."""
    rect = group.find(f"{SVG}rect")
    assert rect is not None
    x, y, width, height = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


def check_drawn(root: ET.Element, machine: Topology) -> None:
    """Every thread once; each box holds the threads of its level and lies inside the box around it."""
    assert sorted(int(thread.attrib["data-cpu"]) for thread in threads(root)) == list(cpus_of(machine.cpus))
    for package in groups(root, "package"):
        number = int(package.attrib["data-package"])
        assert [cpus_below(package)] == [each.cpus for each in machine.packages if each.id == number]
        for node in groups(package, "numa"):
            of_node = machine.node_by_id[NumaId(int(node.attrib["data-numa"]))].cpus & cpus_below(package)
            assert cpus_below(node) == of_node
            for l3 in groups(node, "l3"):
                assert cpus_below(l3) == machine.l3_groups[int(l3.attrib["data-l3"])] & of_node
                for core in groups(l3, "core"):
                    drawn = cpus_below(core)
                    assert drawn == machine.core_of[next(cpus_of(CpuMask(drawn)))] & cpus_below(l3)
    boxes = [group for level in ("package", "numa", "l3", "core") for group in groups(root, level)]
    for outer in boxes:
        left, top, right, bottom = frame(outer)
        inside = [group for group in outer if group.tag == f"{SVG}g"]
        for inner in inside:
            x, y, end, low = frame(inner)
            assert (left <= x, top <= y, end <= right + 0.01, low <= bottom + 0.01) == (True,) * 4
        for one, other in pairwise(inside):
            assert frame(one)[2] <= frame(other)[0] + 0.01 or frame(one)[3] <= frame(other)[1] + 0.01


@settings(deadline=None, max_examples=examples(60))
@given(topologies(tangled=None), st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 40) - 1))
def test_every_thread_of_any_machine_stands_once_in_its_boxes(
    machine: Topology, mine: int, foreign: int
) -> None:
    ledger = ledger_of(claim("db", mine), claim("ci", foreign >> 3, 0, Policy.SHARE))
    drawing = draw("any", machine, ledger, foreign=CpuMask(foreign), found={PodUid("db"): CpuMask(mine >> 1)})
    root = parsed(drawing)
    check_drawn(root, machine)
    states = {int(thread.attrib["data-cpu"]): thread.attrib["data-state"] for thread in threads(root)}
    assert states == {thread.cpu: thread.state.value for thread in drawing.threads}


@pytest.mark.parametrize("name", machine_names())
def test_every_machine_that_comes_with_kvplace_is_drawn(name: str) -> None:
    check_drawn(parsed(draw(name, read_machine(name))), read_machine(name))


@pytest.mark.parametrize("path", CAPTURED_MACHINES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_every_captured_machine_is_drawn(path: Path) -> None:
    machine = recorded_machine(path).topology
    check_drawn(parsed(draw(path.name, machine)), machine)


@pytest.mark.parametrize(("packages", "cores", "threads"), [(1, 4, 2), (8, 64, 2), (16, 32, 2), (2, 64, 8)])
def test_machines_from_8_to_1024_threads_have_a_shape_that_fits_a_screen(
    packages: int, cores: int, threads: int
) -> None:
    total = packages * cores
    sockets = [
        mask_of(
            core + thread * total
            for core in range(number * cores, (number + 1) * cores)
            for thread in range(threads)
        )
        for number in range(packages)
    ]
    machine = make_topology(
        packages=tuple(make_package(number, cpus) for number, cpus in enumerate(sockets)),
        numa_nodes=tuple(make_numa_node(number, cpus, memory=0) for number, cpus in enumerate(sockets)),
        l3_groups=tuple(sockets),
        cores=tuple(mask_of(core + thread * total for thread in range(threads)) for core in range(total)),
    )
    text = svg_map(draw("large", machine))
    root = ET.fromstring(text)
    check_drawn(root, machine)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert 0.7 <= width / height <= 3.2
    assert width <= 2600
    assert len(text) < 800 * machine.cpus.bit_count() + 12_000


def busy() -> CoreMap:
    """A map that shows every state and both kinds of fault."""
    machine = read_machine("2x-epyc-9354-nps2")
    ledger = Ledger()
    for number, smt in enumerate([Smt.PREFER, Smt.ISOLATE, Smt.REQUIRE] * 5):
        ledger = with_vm(
            machine, ledger, f"vm-{number}", Request(3, PinningOptions(scope=Scope.ANY, smt=smt))
        )
    for number in range(2):
        ledger = with_vm(
            machine, ledger, f"ci-{number}", Request(20, PinningOptions(scope=Scope.ANY, policy=Policy.SHARE))
        )
    first, second = list(ledger.claims.values())[:2]
    twice = replace(second, owned=second.owned | first.owned)
    ledger = Ledger(ledger.owners, {**ledger.claims, second.uid: twice})
    free = [thread.cpu for thread in draw("", machine, ledger).threads if thread.state is ThreadState.FREE]
    soon = replace(claim("soon", mask_of(free[4:6])), namespace="default")
    kept = reserve(ledger, soon, but=NO_CPUS, until="2026-01-02T03:05:00Z")
    ledger = Ledger(
        {**ledger.owners, **dict.fromkeys(free[4:6], kept.uid)}, {**ledger.claims, kept.uid: kept}
    )
    machine = replace(machine, isolated=mask_of(free[:2]))
    third = list(ledger.claims.values())[2]
    *vcpus, apart = cpus_of(third.cpus)
    drawing = draw(
        "busy",
        machine,
        ledger,
        foreign=mask_of(free[-2:]),
        found={first.uid: CpuMask(1 << free[3])},
        placements={
            first.uid: Placement(first.policy, (), first.cpus, emulator_cpus=machine.reserved),
            third.uid: Placement(third.policy, tuple(vcpus), third.cpus, emulator_cpus=mask_of([apart])),
        },
    )
    assert all(map(drawing.count, ThreadState))
    return drawing


def test_the_legend_names_every_vm_and_the_key_every_state() -> None:
    drawing = busy()
    root = parsed(drawing)
    text = "\n".join(element.text or "" for element in root.iter(f"{SVG}text"))
    for entry in drawing.legend:
        assert f"default/{entry.claim.vmi}" in text
    for words in (
        "owned by VM A",
        "kept idle",
        "for QEMU's own threads of VM",
        "QEMU's own threads run here",
        "NUMA distances: 12 inside a socket, 32 between sockets",
        "shared, used by VM",
        "reserved for the host",
        "in use outside of kvplace",
    ):
        assert words in text
    assert text.count("conflict: ") + text.count("drift: ") == len(drawing.faults)
    description = root.find(f"{SVG}desc")
    assert description is not None
    for said in (drawing.summary, *(fault.sentence for fault in drawing.faults)):
        assert said in (description.text or "")


def test_the_vm_of_a_thread_can_be_read_without_colour() -> None:
    drawing = busy()
    by_cpu = {thread.cpu: thread for thread in drawing.threads}
    for group in threads(parsed(drawing)):
        thread = by_cpu[CpuId(int(group.attrib["data-cpu"]))]
        texts = [text.text or "" for text in group.iter(f"{SVG}text")]
        assert texts[0] == str(thread.cpu)
        mark = texts[1] if len(texts) > 1 else ""
        assert ("!" in mark) == (thread.fault is not None)
        match thread.state:
            case ThreadState.OWNED | ThreadState.EMULATOR:
                assert mark.startswith(thread.vms[0])
            case ThreadState.KEPT:
                assert mark == f"{thread.vms[0]}?"
            case ThreadState.IDLE:
                assert mark.startswith(thread.vms[0].lower())
            case ThreadState.SHARED:
                assert mark.startswith(thread.vms[0] if len(thread.vms) == 1 else f"×{len(thread.vms)}")
            case ThreadState.FREE:
                assert mark.strip("!") in ("", *thread.strays)
            case state:
                glyphs = {ThreadState.RESERVED: "#", ThreadState.FOREIGN: "%", ThreadState.ISOLATED: ":"}
                assert mark[0] == glyphs[state]
        title = group.find(f"{SVG}title")
        assert title is not None
        assert (title.text or "").startswith(f"CPU {thread.cpu}: {thread.state.value}")
        corners = [path for path in group.iter(f"{SVG}path") if path.attrib["class"] == "qemu"]
        assert len(corners) == bool(thread.qemu)
        assert ("QEMU's own threads" in (title.text or "")) == bool(thread.qemu)


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def mixed(colour: str, ground: str, share: float) -> str:
    return "#" + "".join(
        f"{round(int(colour[at : at + 2], 16) * share + int(ground[at : at + 2], 16) * (1 - share)):02x}"
        for at in (1, 3, 5)
    )


def declared(sheet: str, what: str) -> dict[str, str]:
    """Collect one property of the style sheet, by the last word of the selector."""
    found: dict[str, str] = {}
    for selectors, body in re.findall(r"([^{}]+)\{([^{}]*)\}", sheet):
        value = re.search(rf"(?:^|;|\s){what}: (#[0-9a-f]{{6}});", body)
        if value:
            found |= {selector.split()[-1]: value[1] for selector in selectors.split(",")}
    return found


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_has_contrast_enough_on_its_background_in_light_and_dark_mode(dark: bool) -> None:
    style = parsed(busy()).find(f"{SVG}style")
    assert style is not None
    light_rules, _, dark_rules = (style.text or "").partition("@media (prefers-color-scheme: dark) {")
    fills, strokes = declared(light_rules, "fill"), declared(light_rules, "stroke")
    if dark:
        assert declared(dark_rules, "fill").keys() == fills.keys()
        assert declared(dark_rules, "stroke").keys() == strokes.keys()
        fills, strokes = declared(dark_rules, "fill"), declared(dark_rules, "stroke")
    ink, muted, alarm = fills["text"], fills["text.muted"], fills["text.alarm"]
    vms = [fills[f".vm{index}"] for index in range(12)]
    assert len(set(vms)) == 12
    for ground in vms:
        assert contrast(ink, ground) >= 4.5
        assert contrast(ink, mixed(ground, fills[".core"], 0.45)) >= 4.5
        assert contrast(strokes[".fault"], ground) >= 1.5
    for ground in (
        fills[".page"],
        fills[".package"],
        fills[".numa"],
        fills[".l3"],
        strokes[".hatch"],
        fills[".dot"],
    ):
        assert contrast(ink, ground) >= 4.5
    for text in (muted, alarm, strokes[".fault"]):
        assert contrast(text, fills[".page"]) >= 4.5
    for level in (".package", ".numa", ".l3", ".core"):
        assert contrast(strokes[level], fills[level]) >= 3


@settings(deadline=None, max_examples=examples(50))
@given(st.lists(NAMES, min_size=1, max_size=5), NAMES)
def test_names_of_all_kinds_neither_break_nor_extend_the_document(names: list[str], machine: str) -> None:
    claims = [
        replace(claim(f"u{number}", 1 << number), namespace=name, vmi=name)
        for number, name in enumerate(names)
    ]
    root = parsed(draw(machine, read_machine("epyc-7502p"), ledger_of(*claims)))
    usual = parsed(
        draw("m", read_machine("epyc-7502p"), ledger_of(*(replace(each, vmi="v") for each in claims)))
    )
    assert Counter(each.tag for each in root.iter()) == Counter(each.tag for each in usual.iter())


@pytest.mark.parametrize(
    "name",
    [
        "</title></svg><script>alert(1)</script>",
        '" onload="alert(1)',
        "]]><!-- &amp; &#x41; <?php",
        "\x1b[2J\0\ud800\ufffe\u202e",
        "x" * 5000,
        "漢字" * 40,
    ],
)
def test_a_hostile_name_is_text_and_nothing_else(name: str) -> None:
    text = svg_map(draw(name, read_machine("epyc-7502p"), ledger_of(replace(claim("u", 0b1100), vmi=name))))
    root = ET.fromstring(text)
    assert {each.tag.removeprefix(SVG) for each in root.iter()} == {
        "svg", "title", "desc", "style", "defs", "pattern", "rect", "path", "circle", "g", "text",
    }  # fmt: skip
    attributes = {key for each in root.iter() for key in each.attrib}
    assert not [key for key in attributes if key.startswith("on") or "href" in key]
    text.encode()
    for shown in root.iter(f"{SVG}text"):
        assert len(shown.text or "") < 160


def test_nothing_is_loaded_from_outside() -> None:
    text = svg_map(busy())
    assert set(re.findall(r"url\(([^)]*)\)", text)) == {
        "#kvplace-reserved", "#kvplace-foreign", "#kvplace-isolated",
    }  # fmt: skip
    assert set(re.findall(r"https?://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    root = ET.fromstring(text)
    ids = Counter(each.attrib["id"] for each in root.iter() if "id" in each.attrib)
    assert set(root.attrib["aria-labelledby"].split()) <= set(ids)
    assert max(ids.values()) == 1


def test_equal_maps_give_equal_bytes() -> None:
    assert svg_map(busy()) == svg_map(busy())


def test_parts_of_levels_that_do_not_nest_are_marked() -> None:
    machine = make_topology(
        packages=(make_package(0, 0b0011), make_package(1, 0b1100)),
        numa_nodes=(make_numa_node(0, 0b1111, memory=0), make_numa_node(7, 0, memory=1 << 30)),
        l3_groups=(0b1111,),
        cores=(0b0101, 0b1010),
    )
    root = parsed(draw("odd", machine))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts.count("NUMA 0 (part)") == texts.count("L3 0 (part)") == 2
    assert "memory only" in " ".join(filter(None, texts))
    dashed = [rect for rect in root.iter(f"{SVG}rect") if "stroke-dasharray" in rect.attrib]
    assert len(dashed) == 4


@given(st.text(), st.floats(20, 400))
def test_a_shortened_text_fits_or_is_one_mark(text: str, width: float) -> None:
    short = shortened(text, 10, width)
    assert text_width(short, 10) <= width
    assert short == text or short.endswith("…")
