"""SHA-256 of every file of a release, and a signature of that list."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key

CHECKSUMS = "SHA256SUMS"
SIGNATURE = "SHA256SUMS.sig"


class UnusableKey(Exception):
    """The key for the signature cannot be used; the message names it and the fix."""


def write_checksums(folder: Path) -> Path:
    """Write the list as `sha256sum --check` reads it."""
    lines = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in (CHECKSUMS, SIGNATURE):
            with path.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            lines.append(f"{digest}  {path.relative_to(folder)}\n")
    (folder / CHECKSUMS).write_text("".join(lines))
    return folder / CHECKSUMS


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read the key of a signature: ECDSA, in a PEM file without a passphrase."""
    make = "`openssl ecparam -name prime256v1 -genkey -noout -out release.key` makes one"
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise UnusableKey(f"the key {path} cannot be read: {error.strerror}; {make}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise UnusableKey(f"{path} holds no private key in PEM without a passphrase; {make}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UnusableKey(f"{path} holds no ECDSA key; {make}")
    return key


def sign(checksums: Path, key: ec.EllipticCurvePrivateKey) -> Path:
    """Write the signature beside the list, in base64, as openssl and cosign check it."""
    signature = key.sign(checksums.read_bytes(), ec.ECDSA(SHA256()))
    target = checksums.with_name(SIGNATURE)
    target.write_bytes(base64.encodebytes(signature))
    return target
