"""Kubernetes quantities of bytes, CPUs and huge pages, read exactly, and numbers written for people.

Follows apimachinery's resource.Quantity: binary suffixes Ki..Ei, decimal k..E, `m`, and exponents. Huge pages
are counted by page size: `{"1Gi": 8}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache

from kvplace.core.scalars import Bytes
from kvplace.core.strict_json import shown

_SUFFIXES: dict[str, Fraction] = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
    "Ki": Fraction(2**10),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
    "Pi": Fraction(2**50),
    "Ei": Fraction(2**60),
}
_FORM = re.compile(r"([+-]?)(\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})([eE][+-]?\d{1,2}|[numkKMGTPE]i?|)", re.ASCII)
_LONGEST = 100
"""Characters of a quantity with the spaces around it: it is remembered as it was written."""
_BINARY = ("Ki", "Mi", "Gi", "Ti", "Pi")
_MOST = (1 << 63) - 1
_LEAST_WITHOUT_UNIT = 1 << 20


@lru_cache(maxsize=1024, typed=True)
def parse_quantity(text: str | float) -> Fraction:
    """Read a quantity such as `8Gi`, `500m`, `2` or `1e3`; raises ValueError naming the text.

    The decimal digits of a number with a point are exact, as for the API server: 0.1 is a tenth.
    """
    if isinstance(text, int):
        return Fraction(text)
    written = str(text)
    match = _FORM.fullmatch(written.strip()) if len(written) <= _LONGEST else None
    if match is None:
        raise ValueError(f"{shown(text)} is not a quantity such as 8Gi, 512Mi, 4 or 500m")
    sign, number, suffix = match.groups()
    if suffix[:1] in ("e", "E") and len(suffix) > 1 and suffix != "Ei":
        scale = Fraction(10) ** int(suffix[1:])
    elif suffix in _SUFFIXES:
        scale = _SUFFIXES[suffix]
    else:
        raise ValueError(
            f"{shown(text)} has the unknown suffix {suffix!r}; use Ki, Mi, Gi, Ti, k, M, G, T or m"
        )
    value = Fraction(number) * scale
    return -value if sign == "-" else value


@lru_cache(maxsize=1024, typed=True)
def parse_bytes(text: str | float) -> Bytes:
    """Read a quantity as whole bytes, rounded up as Kubernetes does.

    Raises ValueError below zero and above 63 bits.
    """
    value = parse_quantity(text)
    if value < 0:
        raise ValueError(f"{shown(text)} is negative")
    count = -(-value.numerator // value.denominator)
    if count > _MOST:
        raise ValueError(f"{shown(text)} is more than {_MOST} bytes, the most that Kubernetes can count")
    return Bytes(count)


def parse_memory(text: str | int) -> Bytes:
    """Read an amount of memory that a person wrote: as `parse_bytes`, but a unit must be there.

    Raises ValueError for a few bytes without a unit, which are likely meant otherwise: `32`, `500m`.
    """
    count = parse_bytes(text)
    unit = str(text).strip().lstrip("+0123456789.")
    if 0 < count < _LEAST_WITHOUT_UNIT and unit[:1] in ("", "n", "u", "m", "e"):
        number = str(text).strip().removesuffix(unit)
        meant = (
            f"{number}Mi" if unit == "m" else (str(count) if unit[:1] == "e" else number) + _usual_unit(count)
        )
        what = "less than a byte" if parse_quantity(text) < 1 else counted(count, "byte")
        raise ValueError(f'{shown(text)} is {what}; write "{meant}" if that is meant')
    return count


def _usual_unit(number: int) -> str:
    """Guess the unit of a number that has none: a VM has 32 GiB, or 2048 MiB, or 4194304 KiB."""
    return "Gi" if number < 512 else "Mi" if number < 512 << 10 else "Ki"


def format_bytes(count: int) -> str:
    """Write bytes with the largest binary suffix that loses nothing: 8589934592 is `8Gi`."""
    text = str(count)
    for power, suffix in enumerate(_BINARY, start=1):
        if count and count % (1 << (10 * power)) == 0:
            text = f"{count >> (10 * power)}{suffix}"
    return text


def about_bytes(count: int) -> str:
    """Write bytes as people state them, to three digits: 8345600Ki is `7.96Gi`, 8Gi stays `8Gi`."""
    power = min((max(count, 1).bit_length() - 1) // 10, len(_BINARY))
    if not power:
        return str(count)
    amount = count / (1 << 10 * power)
    digits = 0 if amount >= 100 else 1 if amount >= 10 else 2
    text = f"{amount:.{digits}f}"
    return (text.rstrip("0").rstrip(".") if digits else text) + _BINARY[power - 1]


def counted(number: int, noun: str) -> str:
    """Write how many there are of something that people count: `1 node`, `2 nodes`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def first_of(names: Sequence[str], most: int) -> str:
    """Name the first of many, and count the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


MOST_PAGES = 1 << 40


def bytes_in_pages(pages: Mapping[Bytes, int]) -> Bytes:
    """Add up the bytes of pages."""
    return Bytes(sum(size * count for size, count in pages.items()))


def plain_bytes(memory: Bytes, pages: Mapping[Bytes, int]) -> Bytes:
    """State how much memory lies outside huge pages, given all of it."""
    return Bytes(max(0, memory - bytes_in_pages(pages)))


def write_page_counts(pages: Mapping[Bytes, int]) -> dict[str, int]:
    """Write counts by page size, smallest first."""
    return {format_bytes(size): count for size, count in sorted(pages.items())}


def read_page_counts(pages: object, at: str) -> dict[Bytes, int]:
    """Read counts by page size; raises ValueError that names the entry, also for a size given twice."""
    if not isinstance(pages, Mapping):
        raise ValueError(  # noqa: TRY004
            f'{at} is {shown(pages)}; it must be an object of counts by page size such as {{"1Gi": 8}}'
        )
    counts: dict[Bytes, int] = {}
    for text, count in pages.items():
        try:
            size = parse_bytes(text)
        except ValueError as error:
            raise ValueError(f"{at}: {error}") from None
        if not size:
            raise ValueError(f"{at}: {shown(text)} is not a page size; write 2Mi or 1Gi")
        if size in counts:
            raise ValueError(f"{at} has pages of {format_bytes(size)} twice; write one count of them")
        if type(count) is not int or not 0 <= count <= MOST_PAGES:
            raise ValueError(
                f"{at}[{shown(text)}] is {shown(count)}; it must be a whole number from 0 to {MOST_PAGES}"
            )
        counts[size] = count
    return counts
