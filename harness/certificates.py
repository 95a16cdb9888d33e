"""Certificates for listeners and their clients, issued into a folder as an operator would."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class Authority:
    """A CA that issues certificates into a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = self._builder(self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.file = folder / f"{name}.crt"
        self._write(self.file, certificate)

    def issue(
        self, name: str, *, usage: x509.ObjectIdentifier | None = None, lasts: timedelta = timedelta(days=1)
    ) -> tuple[Path, Path]:
        """Write a certificate for loopback and its key; again under the same name replaces both.

        `usage` limits its purpose; one that `lasts` less than no time has expired.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = self._builder(subject, key, lasts).add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False
        )
        if usage is not None:
            certificate = certificate.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        files = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        self._write(files[0], certificate)
        files[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return files

    def _write(self, file: Path, certificate: x509.CertificateBuilder) -> None:
        signed = certificate.sign(self._key, hashes.SHA256())
        file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, lasts: timedelta = timedelta(days=1)
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + lasts)
        )


@dataclass(frozen=True)
class Certificates:
    """The operator's CA, a stranger's, and the certificates of the first one."""

    ours: Authority
    stranger: Authority
    serve: tuple[Path, Path]
    client: tuple[Path, Path]

    @classmethod
    def issue(cls, folder: Path) -> Self:
        """Issue the certificates of an installation."""
        ours = Authority(folder, "ours")
        return cls(ours, Authority(folder, "stranger"), ours.issue("serve"), ours.issue("kvplace-scheduler"))

    def as_client(self, pair: tuple[Path, Path] | None) -> ssl.SSLContext:
        """Make the context of a client that trusts the operator's CA and shows a certificate, or none."""
        context = ssl.create_default_context(cafile=str(self.ours.file))
        if pair is not None:
            context.load_cert_chain(*pair)
        return context
