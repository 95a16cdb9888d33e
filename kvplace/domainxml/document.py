"""A domain document from an untrusted author: parsed, edited in its own indentation, and written back.

The XML of a virt-launcher pod contains names and paths chosen by the VM's owner. So the parser expands no
entity, loads no DTD, opens no connection and limits the length. It normalises empty elements and quotes,
which means the same to libvirt and to KubeVirt; namespaces, prefixes, comments, attribute order, CDATA and
white space stay.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

from lxml import etree

from kvplace.core.errors import BadDomainXml
from kvplace.core.scalars import Bytes

Encoding = Literal["UTF-8", "US-ASCII"]

MAX_DOMAIN_BYTES = 2 * 1024 * 1024
"""Longest document we read; a VM with 512 vCPUs and hundreds of disks stays below a quarter of it."""

_DECLARATION = re.compile(rb"<\?xml\s[^>]*\?>")
_DECLARED_ENCODING = re.compile(rb"encoding\s*=\s*[\"']([^\"']*)[\"']")
_BEFORE_ROOT = re.compile(rb"(?:\s+|<\?.*?\?>|<!--.*?-->)*+", re.DOTALL)
_ENCODINGS: dict[str, Encoding] = {"utf-8": "UTF-8", "utf8": "UTF-8", "us-ascii": "US-ASCII"}
_HARMLESS = (etree.ErrorTypes.NS_ERR_UNDEFINED_NAMESPACE, etree.ErrorTypes.WAR_NS_URI)
_MOST_ERRORS = 100
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


_UNIT = re.compile(r"b|bytes?|(?P<letter>[kmgtpe])(?P<ending>ib|b)?", re.IGNORECASE | re.ASCII)
_LETTERS = "kmgtpe"
_DEFAULT_UNIT = "KiB"


@dataclass(frozen=True, slots=True)
class DomainDocument:
    """A parsed domain and the text around its root; `root` may be changed in place."""

    root: etree._Element
    before: bytes
    encoding: Encoding
    after: bytes

    def to_bytes(self) -> bytes:
        """Write the document in the encoding that it was read in."""
        text = etree.tostring(self.root, encoding=self.encoding, xml_declaration=False, with_tail=False)
        return self.before + text + self.after


def parse(xml: bytes) -> DomainDocument:
    """Parse one `<domain>`; raises BadDomainXml, which names the fault in one sentence."""
    if len(xml) > MAX_DOMAIN_BYTES:
        raise BadDomainXml(f"the domain XML is {len(xml)} bytes long, above the limit of {MAX_DOMAIN_BYTES}")
    text = xml.removeprefix(_BYTE_ORDER_MARK).strip()
    if not text:
        raise BadDomainXml("the domain XML is empty; a document with the root <domain> is needed")
    encoding = _encoding_of(text)
    before = _before_root(text)
    root = _root_of(text)
    if cast(object, root.getroottree().docinfo.internalDTD) is not None:
        raise _declares_doctype()
    if root.tag != "domain":
        shown = str(root.tag)
        raise BadDomainXml(
            f"the document's root is <{shown[:60]}>, not <domain>; a libvirt domain document is needed"
        )
    after = b"".join(b"\n" + etree.tostring(node, encoding=encoding) for node in root.itersiblings())
    return DomainDocument(root=root, before=before, encoding=encoding, after=after + xml[len(xml.rstrip()) :])


def _root_of(text: bytes) -> etree._Element:
    """Parse the text; a prefix without a usable namespace is part of a name, as it is to libvirt."""
    strict = _parser(recover=False)
    try:
        return etree.fromstring(text, strict)
    except etree.XMLSyntaxError as error:
        # libxml2 stops counting errors, and an error that is not counted may not be harmless.
        errors = strict.error_log
        if len(errors) >= _MOST_ERRORS or any(each.type not in _HARMLESS for each in errors):
            raise BadDomainXml(f"the domain XML is not well-formed: {error.msg}") from None
    return etree.fromstring(text, _parser(recover=True))


def _parser(*, recover: bool) -> etree.XMLParser:
    return etree.XMLParser(
        encoding="utf-8",
        resolve_entities=False,
        load_dtd=False,
        dtd_validation=False,
        attribute_defaults=False,
        no_network=True,
        huge_tree=False,
        strip_cdata=False,
        remove_comments=False,
        remove_pis=False,
        recover=recover,
    )


def text_of(element: etree._Element) -> str:
    """Return the text in an element as libvirt reads it: without comments and surrounding blanks."""
    return etree.tostring(element, method="text", encoding="unicode", with_tail=False).strip()


def _encoding_of(text: bytes) -> Encoding:
    if text[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in text[:4]:
        raise BadDomainXml("the domain XML is not UTF-8 text; KubeVirt and libvirt exchange it as UTF-8")
    declaration = _DECLARATION.match(text)
    declared = _DECLARED_ENCODING.search(declaration[0]) if declaration else None
    if declared is None:
        return "UTF-8"
    name = declared[1].decode("ascii", "replace")
    if name.lower() not in _ENCODINGS:
        raise BadDomainXml(
            f"the domain XML declares the encoding {name[:40]!r}; KubeVirt and libvirt exchange it as UTF-8"
        )
    return _ENCODINGS[name.lower()]


def _before_root(text: bytes) -> bytes:
    """Cut off the text before the root; refuses a DOCTYPE unparsed, so that no entity is ever defined."""
    match = _BEFORE_ROOT.match(text)
    end = match.end() if match else 0
    if text[end : end + 9] == b"<!DOCTYPE":
        raise _declares_doctype()
    return text[:end]


def _declares_doctype() -> BadDomainXml:
    return BadDomainXml(
        "the domain XML has a DOCTYPE, which no domain needs and which is never expanded; remove it"
    )


def bytes_of(amount: str, unit: str | None, what: str) -> Bytes:
    """Read a size; raises BadDomainXml with one sentence that starts with `what`."""
    unit = unit or _DEFAULT_UNIT
    match = _UNIT.fullmatch(unit)
    if match is None or not (amount.isascii() and amount.isdigit() and len(amount) <= 20):
        raise BadDomainXml(f"{what} is {amount[:40]!r} {unit[:10]!r}, not a size such as 4194304 KiB")
    letter, ending = match["letter"], match["ending"]
    if letter is None:
        return Bytes(int(amount))
    base = 1000 if ending in ("b", "B") else 1024
    return Bytes(int(amount) * base ** (_LETTERS.index(letter.lower()) + 1))


def text_bytes_of(element: etree._Element, what: str) -> Bytes:
    """Read the size that is an element's text; raises as `bytes_of`."""
    return bytes_of(text_of(element), element.get("unit"), what)


def only_child(root: etree._Element, name: str) -> etree._Element | None:
    """Find the one child of that name; raises BadDomainXml when there are several, which libvirt misreads."""
    found = root.findall(name)
    if len(found) > 1:
        raise BadDomainXml(f"the domain has {len(found)} <{name}> elements, but libvirt reads one; keep one")
    return found[0] if found else None


def indentation_of(root: etree._Element) -> str | None:
    """Return the indentation of the root's children; None when the document has no line breaks."""
    before_first = root.text or ""
    if before_first.strip() or "\n" not in before_first:
        return None
    return before_first.rpartition("\n")[2] or None


def remove(element: etree._Element) -> None:
    """Remove an element from its parent and keep the text that follows it."""
    parent = element.getparent()
    if parent is None:
        return
    if element.tail and element.tail.strip():
        before = element.getprevious()
        if before is None:
            parent.text = (parent.text or "") + element.tail
        else:
            before.tail = (before.tail or "") + element.tail
    parent.remove(element)


def remove_child_of_root(element: etree._Element) -> None:
    """Remove a child of the root together with its line."""
    before, root, tail = element.getprevious(), element.getparent(), element.tail
    remove(element)
    if tail and tail.strip():
        return  # `remove` has kept this text
    if before is not None and not (before.tail or "").strip():
        before.tail = tail
    elif before is None and root is not None and not (root.text or "").strip():
        root.text = tail


def add_to_root(root: etree._Element, element: etree._Element, *, after: etree._Element | None) -> None:
    """Insert an element after `after`, or at the end, on a line of its own where the document has lines."""
    indentation = indentation_of(root)
    anchor = after if after is not None else (root[-1] if len(root) else None)
    if anchor is None:
        root.append(element)
        return
    tail = anchor.tail
    anchor.addnext(element)
    element.tail = tail
    anchor.tail = None if indentation is None else f"\n{indentation}"


def align(root: etree._Element, element: etree._Element) -> None:
    """Indent the content of a child of the root in the document's own way."""
    indentation = indentation_of(root)
    if indentation is not None and len(element):
        etree.indent(element, space=indentation, level=1)
