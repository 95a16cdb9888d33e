"""Writes a placement into a libvirt domain document and leaves the rest of the document alone.

Pure: bytes and a placement in, bytes out. Whether the CPUs exist on this machine, and whether the
placement belongs to this pod, is the caller's question.
"""

from kvplace.domainxml.document import MAX_DOMAIN_BYTES
from kvplace.domainxml.rewriting import rewrite

__all__ = ["MAX_DOMAIN_BYTES", "rewrite"]
