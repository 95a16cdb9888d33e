"""kvplace's own CA and the two certificates that it signs: pure, apart from making keys.

A certificate is renewed when a third of its time is left, or when it does not suit the installation:
another name, another CA, a key that does not belong to it. The CA gets a successor with a new key when a
third of its time is left. For the first half of that time the successor is only published, so that all
programs trust it before it signs: kube-scheduler reads the CA once, at its start. From then on it signs, and
the old certificate stays published until it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
"""The keys of a Secret with a certificate, as Kubernetes and cert-manager name them."""
_NEXT_CERTIFICATE, _NEXT_KEY, _PREVIOUS = "next.crt", "next.key", "previous.crt"
"""The keys of the CA's Secret for its successor, and for the certificate of its predecessor."""

_CLOCKS_DIFFER_BY = timedelta(hours=1)
_CA_LASTS = timedelta(days=3650)
_LASTS = timedelta(days=90)
_NAME_OF_CA = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvplace CA")])

_UNREADABLE = (
    *(KeyError, ValueError, TypeError, UnsupportedAlgorithm),
    *(x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType),
)
"""The errors of the library for a Secret without a certificate or key, or with a damaged one."""

Stored = Mapping[str, bytes]
"""The content of a Secret."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The purpose of a certificate: a server with its names, or a client."""

    name: str
    dns_names: tuple[str, ...] = ()

    @property
    def usage(self) -> x509.ObjectIdentifier:
        """The extended key usage."""
        return ExtendedKeyUsageOID.SERVER_AUTH if self.dns_names else ExtendedKeyUsageOID.CLIENT_AUTH


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def read(cls, stored: Stored) -> Self | None:
        """Read a Secret; None when it is not a certificate with its own key."""
        try:
            certificate = x509.load_pem_x509_certificate(stored[CERTIFICATE])
            key = load_pem_private_key(stored[KEY], password=None)
            if (
                not isinstance(key, ec.EllipticCurvePrivateKey)
                or key.public_key() != certificate.public_key()
            ):
                return None
            # These are read only when they are asked for, and later no caller expects that they cannot be.
            _ = certificate.subject, certificate.issuer, certificate.extensions
        except _UNREADABLE:
            return None
        return cls(certificate, key)

    def is_due(self, now: datetime) -> bool:
        """Whether less than a third of its time is left, or its time has not come."""
        begin, end = self.certificate.not_valid_before_utc, self.certificate.not_valid_after_utc
        return not begin <= now < end - (end - begin) / 3

    @property
    def pem(self) -> bytes:
        """The certificate as PEM."""
        return self.certificate.public_bytes(Encoding.PEM)

    def document(self, authority: bytes) -> dict[str, bytes]:
        """Return the content of its Secret, with the certificate of the CA that clients trust."""
        key = self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return {CERTIFICATE: self.pem, KEY: key, AUTHORITY: authority}


@dataclass(frozen=True, slots=True)
class Authority:
    """The CA of an installation."""

    signer: Pair
    successor: Pair | None = None
    """The next signer; it is published already."""
    previous: x509.Certificate | None = None
    """The former signer, until it ends."""

    @classmethod
    def read(cls, stored: Stored) -> Self | None:
        """Read a Secret; None where nothing in it can sign."""
        signer = _authority_in(stored, CERTIFICATE, KEY)
        successor = _authority_in(stored, _NEXT_CERTIFICATE, _NEXT_KEY)
        if signer is None:  # damaged: a client that trusts the bundle trusts its successor
            return None if successor is None else cls(successor)
        return cls(signer, successor, _certificate_in(stored, _PREVIOUS))

    @property
    def bundle(self) -> bytes:
        """All certificates that make others trust this CA, as PEM."""
        successor = b"" if self.successor is None else self.successor.pem
        previous = b"" if self.previous is None else self.previous.public_bytes(Encoding.PEM)
        return self.signer.pem + successor + previous

    def document(self) -> dict[str, bytes]:
        """Return the content of its Secret."""
        document = self.signer.document(self.bundle)
        if self.successor is not None:
            written = self.successor.document(b"")
            document |= {_NEXT_CERTIFICATE: written[CERTIFICATE], _NEXT_KEY: written[KEY]}
        if self.previous is not None:
            document[_PREVIOUS] = self.previous.public_bytes(Encoding.PEM)
        return document

    def at(self, now: datetime) -> Authority:
        """Return it as it should be at a time: with a successor in time, which signs in time."""
        previous = self.previous if self.previous and now < self.previous.not_valid_after_utc else None
        if self.successor is not None:
            published, end = (
                self.successor.certificate.not_valid_before_utc,
                self.signer.certificate.not_valid_after_utc,
            )
            if now >= published + (end - published) / 2:
                return Authority(self.successor, None, self.signer.certificate)
        elif self.signer.is_due(now):
            return Authority(self.signer, _new_authority(now), previous)
        return Authority(self.signer, self.successor, previous)


def current_authority(stored: Stored, now: datetime) -> Authority:
    """Return the stored CA as it should be now, or a new one."""
    found = Authority.read(stored)
    return Authority(_new_authority(now)) if found is None else found.at(now)


def _authority_in(stored: Stored, certificate: str, key: str) -> Pair | None:
    if certificate not in stored or key not in stored:
        return None
    found = Pair.read({CERTIFICATE: stored[certificate], KEY: stored[key]})
    return found if found is not None and _is_authority(found.certificate) else None


def _certificate_in(stored: Stored, key: str) -> x509.Certificate | None:
    try:
        return x509.load_pem_x509_certificate(stored[key])
    except _UNREADABLE:
        return None


def current_certificate(stored: Stored, subject: Subject, authority: Pair, now: datetime) -> Pair:
    """Return the stored certificate while it serves its purpose, else a new one with a new key."""
    found = Pair.read(stored)
    if found is not None and not found.is_due(now) and _is_for(found.certificate, subject, authority):
        return found
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject.name)])
    builder = (
        _builder(name, authority.certificate.subject, key, now, _LASTS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([subject.usage]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(_key_identifier(authority)),
            critical=False,
        )
    )
    if subject.dns_names:
        names = x509.SubjectAlternativeName([x509.DNSName(name) for name in subject.dns_names])
        builder = builder.add_extension(names, critical=False)
    return Pair(builder.sign(authority.key, SHA256()), key)


def _new_authority(now: datetime) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        _builder(_NAME_OF_CA, _NAME_OF_CA, key, now, _CA_LASTS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return Pair(builder.sign(key, SHA256()), key)


def _builder(
    name: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    lasts: timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER_BY)
        .not_valid_after(now + lasts)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _key_identifier(authority: Pair) -> x509.SubjectKeyIdentifier:
    """Return the key identifier of a CA: OpenSSL wants the same in all certificates that it has signed."""
    try:
        return authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    except x509.ExtensionNotFound:
        return x509.SubjectKeyIdentifier.from_public_key(authority.key.public_key())


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def _is_for(certificate: x509.Certificate, subject: Subject, authority: Pair) -> bool:
    try:
        certificate.verify_directly_issued_by(authority.certificate)
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (InvalidSignature, ValueError, TypeError, x509.ExtensionNotFound):
        return False
    named = [str(name.value) for name in certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
    return (
        named == [subject.name] and _dns_names(certificate) == subject.dns_names and subject.usage in usages
    )


def _dns_names(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(found.get_values_for_type(x509.DNSName))
