"""Whatever the document and the placement: the pins are ours, the rest is not."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lxml import etree

from kvplace.core.errors import BadDomainXml
from kvplace.core.placement import Placement
from kvplace.domainxml import rewrite, unpin
from tests.captured import captured_files, captured_folder
from tests.domainxml.placements import FOUR_VCPUS, MANY_VCPUS, WHOLE_NODE, placements
from tests.kubevirt_documents import DOMAINS

CORPUS = sorted(DOMAINS.glob("*.domain.xml")) + captured_files("libvirt/domains", "*.xml")
each_document = pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
OURS = ("vcpu", "cputune", "numatune")
PINS = ("vcpupin", "emulatorpin", "iothreadpin")


def canonical(element: etree._Element) -> bytes:
    if isinstance(element, etree._Comment | etree._ProcessingInstruction):  # c14n of a lone one crashes lxml
        return etree.tostring(element, with_tail=False)
    return etree.tostring(element, method="c14n")


def text_inside(element: etree._Element) -> str:
    """The text between the children of an element, without white space."""
    pieces = [element.text or "", *(child.tail or "" for child in element)]
    return "".join("".join(pieces).split())


def not_ours(xml: bytes) -> list[object]:
    """Everything of a document that a placement has no state in, in document order."""
    root = etree.fromstring(xml)
    kept: list[object] = [sorted(root.items()), list(root.attrib), root.nsmap]
    kept.append(text_inside(root))
    for child in root:
        if child.tag in ("cputune", "numatune"):
            kept.extend(canonical(part) for part in child if part.tag not in (*PINS, "memory", "memnode"))
            kept.extend(filter(None, [text_inside(child)]))
        elif child.tag == "vcpu":
            kept.append([(key, value) for key, value in child.items() if key != "placement"] + [child.text])
        else:
            kept.append(canonical(child))
    return kept


def lines_not_ours(xml: bytes) -> list[str]:
    """The lines of a pretty document outside our elements, with empty elements written one way."""
    root = etree.fromstring(xml)
    for child in [child for child in root if child.tag in OURS]:
        root.remove(child)
    lines = [line for line in etree.tostring(root).decode().splitlines() if line.strip()]
    return [*lines[:-1], lines[-1].strip()]  # the end tag's indentation follows from the last child


def test_the_corpus_is_here() -> None:
    assert len(list(DOMAINS.glob("*.domain.xml"))) >= 10
    assert len(list(captured_folder("libvirt/domains").glob("*.xml"))) >= 80


@each_document
def test_only_pins_and_memory_binding_change_in_captured_documents(path: Path) -> None:
    xml = path.read_bytes()
    pinned = rewrite(xml, WHOLE_NODE)
    assert not_ours(pinned) == not_ours(xml)
    assert lines_not_ours(pinned) == lines_not_ours(xml)


@each_document
@pytest.mark.parametrize("first", [WHOLE_NODE, MANY_VCPUS])
def test_three_chained_calls_on_captured_documents_give_one_answer(path: Path, first: Placement) -> None:
    xml = path.read_bytes()
    wanted = rewrite(xml, WHOLE_NODE)
    assert rewrite(rewrite(wanted, WHOLE_NODE), WHOLE_NODE) == wanted
    assert rewrite(rewrite(xml, first), WHOLE_NODE) == wanted


@given(data=st.data(), first=placements(least_vcpus=40), second=placements(least_vcpus=40))
def test_rewriting_an_answer_is_rewriting_the_original(
    data: st.DataObject, first: Placement, second: Placement
) -> None:
    captured_folder("libvirt/domains")
    xml = data.draw(st.sampled_from(CORPUS)).read_bytes()
    wanted = rewrite(xml, second)
    assert rewrite(wanted, second) == wanted
    assert rewrite(rewrite(xml, first), second) == wanted


WORDS = st.text("abcdefgh", min_size=1, max_size=6)
TEXTS = st.text("ab <>&'\"]äß€\u2028\U0001f40d\n\t", max_size=12)


@st.composite
def strange_elements(draw: st.DrawFn, depth: int = 2) -> etree._Element:
    element = etree.Element(draw(WORDS | st.just("{http://libvirt.org/schemas/domain/qemu/1.0}commandline")))
    for key, value in draw(st.dictionaries(WORDS, TEXTS, max_size=3)).items():
        element.set(key, value)
    element.text = draw(TEXTS)
    if depth:
        for child in draw(st.lists(strange_elements(depth=depth - 1), max_size=3)):
            element.append(child)
            child.tail = draw(TEXTS)
    if draw(st.booleans()):
        element.append(etree.Comment(draw(WORDS)))
    return element


@st.composite
def strange_domains(draw: st.DrawFn) -> bytes:
    """A domain with unknown elements, comments and text, and our own elements at any place or not at all."""
    root = etree.Element("domain", nsmap={"qemu": "http://libvirt.org/schemas/domain/qemu/1.0"})
    ours = [
        '<vcpu current="2">4</vcpu>',
        "<cputune>a<shares>9</shares>b<!--c-->c<vcpupin vcpu='0' cpuset='9'/>d<emulatorpin/>e</cputune>",
        "<cputune>e<vcpupin vcpu='0' cpuset='9'/>f<shares>9</shares></cputune>",
        "<numatune>g<memory mode='strict' nodeset='1'/>h<unknown/></numatune>",
        "<iothreads>2</iothreads>",
    ]
    children = [etree.fromstring(text) for text in draw(st.lists(st.sampled_from(ours), unique=True))]
    children += draw(st.lists(strange_elements(), max_size=4))
    for child in draw(st.permutations(children)):
        root.append(child)
    if draw(st.booleans()):
        etree.indent(root, draw(st.sampled_from(["\t", "  "])))
    before = draw(st.sampled_from(["", '<?xml version="1.0"?>\n', "<!-- written by hand -->\n", "<?pi?>"]))
    return before.encode() + etree.tostring(root, encoding="UTF-8", xml_declaration=False) + b"\n"


@given(xml=strange_domains(), first=placements(4), second=placements(4))
def test_strange_documents_keep_everything_that_is_not_ours(
    xml: bytes, first: Placement, second: Placement
) -> None:
    assert not_ours(rewrite(xml, second)) == not_ours(xml)
    wanted = rewrite(xml, second)
    assert rewrite(rewrite(xml, first), second) == wanted


@given(
    junk=st.binary(max_size=300) | TEXTS.map(str.encode) | TEXTS.map(lambda text: f"<domain>{text}".encode())
)
def test_junk_is_refused_or_answered_with_a_whole_document(junk: bytes) -> None:
    with contextlib.suppress(BadDomainXml):
        assert etree.fromstring(rewrite(junk, FOUR_VCPUS)).tag == "domain"


def test_namespaces_comments_cdata_and_the_declaration_stay_as_written() -> None:
    xml = (
        b'<?xml version="1.0" encoding="UTF-8"?>\n<!-- by hand -->\n'
        b"<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0' id='7'>\n"
        b"  <!-- a \xc3\xa4 -->\n  <name><![CDATA[a&b]]></name>\n  <vcpu>1</vcpu>\n"
        b"  <qemu:commandline>\n    <qemu:arg value='-s'/>\n  </qemu:commandline>\n</domain>\n"
    )
    assert rewrite(xml, FOUR_VCPUS).decode() == (
        '<?xml version="1.0" encoding="UTF-8"?>\n<!-- by hand -->\n'
        '<domain xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0" type="kvm" id="7">\n'
        '  <!-- a ä -->\n  <name><![CDATA[a&b]]></name>\n  <vcpu placement="static">1</vcpu>\n'
        '  <cputune>\n    <vcpupin vcpu="0" cpuset="2"/>\n'
        '    <emulatorpin cpuset="0-1,32-33"/>\n  </cputune>\n'
        '  <numatune>\n    <memory mode="preferred" nodeset="0"/>\n  </numatune>\n'
        '  <qemu:commandline>\n    <qemu:arg value="-s"/>\n  </qemu:commandline>\n</domain>\n'
    )


@pytest.mark.parametrize(
    "lines",
    [
        b'<qemu:commandline>\n    <qemu:arg value="-s"/>\n  </qemu:commandline>',
        b'<metadata>\n    <app:owner xmlns:app="no uri" app:since="1" team:name="a"/>\n  </metadata>',
    ],
)
def test_a_prefix_that_nothing_declares_or_with_an_odd_uri_stays_part_of_its_name(lines: bytes) -> None:
    xml = b"<domain>\n  <vcpu>1</vcpu>\n  " + lines + b"\n</domain>"
    assert lines in rewrite(xml, FOUR_VCPUS)
    with pytest.raises(BadDomainXml, match="not well-formed"):
        rewrite(xml.replace(b"</vcpu>", b"</cpu>"), FOUR_VCPUS)
    with pytest.raises(BadDomainXml, match="not well-formed"):
        rewrite(xml.replace(b"<vcpu>", b"<a:a/>" * 200 + b"<vcpu>"), FOUR_VCPUS)


@each_document
def test_an_unpinned_domain_names_no_cpu_or_node_and_is_otherwise_unchanged(path: Path) -> None:
    xml = path.read_bytes()
    try:
        removed = unpin(rewrite(xml, FOUR_VCPUS))
    except BadDomainXml:
        removed = unpin(xml)
    root = etree.fromstring(removed)
    assert not [pin for pin in PINS if root.findall(f"cputune/{pin}")]
    assert not root.findall("numatune/memory")
    assert not root.findall("numatune/memnode")
    assert not_ours(removed) == not_ours(xml)
    assert unpin(removed) == removed
