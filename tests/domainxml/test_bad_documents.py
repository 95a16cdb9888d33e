"""A document that is not a domain is refused, with one sentence that names the fault."""

from __future__ import annotations

import pytest

from kvplace.core.errors import BadDomainXml
from kvplace.domainxml import MAX_DOMAIN_BYTES, rewrite
from tests.domainxml.placements import FOUR_VCPUS

BILLION_LAUGHS = (
    b'<?xml version="1.0"?>\n<!-- <domain> --><!DOCTYPE domain [<!ENTITY a "ha">'
    + b"".join(
        b'<!ENTITY %c "%s">' % (letter, b"&%c;" % (letter - 1) * 10) for letter in range(ord("b"), ord("k"))
    )
    + b"]><domain><name>&j;</name><vcpu>1</vcpu></domain>"
)


@pytest.mark.parametrize(
    ("xml", "sentence"),
    [
        (b"", "the domain XML is empty"),
        (b" \n\t", "the domain XML is empty"),
        (b"hello", "not well-formed"),
        (b"<domain>", "not well-formed"),
        (b"<domain/><domain/>", "not well-formed"),
        (b"<domain><name>\xff</name></domain>", "not well-formed"),
        (b"<domain>" + b"<a>" * 300 + b"</a>" * 300 + b"</domain>", "not well-formed"),
        (b"<network/>", r"root is <network>, not <domain>"),
        (b"<domainsnapshot><domain/></domainsnapshot>", "root is <domainsnapshot>"),
        (b"<domain xmlns='urn:x'><vcpu>1</vcpu></domain>", r"root is <\{urn:x\}domain>"),
        (b'{"kind": "VirtualMachine"}', "not well-formed"),
        (BILLION_LAUGHS, "has a DOCTYPE"),
        (
            b'<!DOCTYPE d [<!ENTITY x SYSTEM "file:///etc/passwd">]><domain><name>&x;</name></domain>',
            "has a DOCTYPE",
        ),
        (b'<!DOCTYPE domain SYSTEM "http://127.0.0.1/x.dtd"><domain/>', "has a DOCTYPE"),
        (b"<domain>&undefined;</domain>", "not well-formed"),
        ("<domain/>".encode("utf-16"), "is not UTF-8 text"),
        ("<domain/>".encode("utf-16-be"), "is not UTF-8 text"),
        (b'<?xml version="1.0" encoding="UTF-7"?><domain/>', "declares the encoding 'UTF-7'"),
        (b"<domain>" + b" " * MAX_DOMAIN_BYTES + b"</domain>", f"above the limit of {MAX_DOMAIN_BYTES}"),
    ],
)
def test_a_document_that_is_not_a_domain_is_refused(xml: bytes, sentence: str) -> None:
    with pytest.raises(BadDomainXml, match=sentence) as caught:
        rewrite(xml, FOUR_VCPUS)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("inside", "sentence"),
    [
        ("<vcpu>four</vcpu>", "<vcpu> is 'four', not a whole number from 1"),
        ("<vcpu></vcpu>", "<vcpu> is ''"),
        ("<vcpu>0</vcpu>", "<vcpu> is '0'"),
        ("<vcpu>-1</vcpu>", "<vcpu> is '-1'"),
        ("<vcpu>99999999999999999999</vcpu>", "not a whole number from 1 to 65535"),
        ("<vcpu>1</vcpu><vcpu>2</vcpu>", "2 <vcpu> elements"),
        ("<vcpu current='5'>4</vcpu>", "<vcpu current> is 5, above the 4 vCPUs"),
        ("<vcpu current='x'>4</vcpu>", "<vcpu current> is 'x'"),
        ("<vcpu placement='auto' cpuset='0-3'>4</vcpu>", "libvirt silently drops"),
        ("<vcpu>2</vcpu><vcpus><vcpu id='0' enabled='no'/></vcpus>", "disables vCPU 0"),
        (
            "<vcpu>2</vcpu><vcpus><vcpu id='0' enabled='yes'/><vcpu id='2' enabled='no'/></vcpus>",
            "contains vCPU 2",
        ),
        ("<vcpu>2</vcpu><vcpus><vcpu enabled='yes'/></vcpus>", "<vcpu id> is ''"),
        ("<vcpu>1</vcpu><iothreads>many</iothreads>", "<iothreads> is 'many'"),
        ("<vcpu>1</vcpu><iothreadids><iothread id='0'/></iothreadids>", "<iothread id> is '0'"),
        (
            "<vcpu>1</vcpu><iothreadids><iothread id='3'/><iothread id='3'/></iothreadids>",
            "I/O thread 3 twice",
        ),
    ],
)
def test_counts_that_libvirt_would_refuse_or_drop_are_refused_first(inside: str, sentence: str) -> None:
    with pytest.raises(BadDomainXml) as caught:
        rewrite(f"<domain>{inside}</domain>".encode(), FOUR_VCPUS)
    assert sentence in str(caught.value)


def test_a_doctype_that_is_only_mentioned_does_no_harm() -> None:
    xml = b"<!-- <!DOCTYPE x> --><domain><title><![CDATA[<!DOCTYPE x>]]></title><vcpu>1</vcpu></domain>"
    assert rewrite(xml, FOUR_VCPUS).startswith(
        b"<!-- <!DOCTYPE x> --><domain><title><![CDATA[<!DOCTYPE x>]]>"
    )


def test_character_references_survive_in_the_encoding_the_document_declares() -> None:
    xml = b'<?xml version="1.0" encoding="us-ascii"?><domain><title>&#228;</title><vcpu>1</vcpu></domain>'
    assert b"<title>&#228;</title>" in rewrite(xml, FOUR_VCPUS)
