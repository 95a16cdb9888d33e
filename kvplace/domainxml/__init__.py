"""Writes a placement into a libvirt domain document and leaves the rest of the document unchanged.

Pure: bytes and a placement in, bytes out. Whether the CPUs exist on this machine, and whether the placement
belongs to this pod, must be checked by the caller.
"""

from kvplace.domainxml.document import MAX_DOMAIN_BYTES
from kvplace.domainxml.host_devices import AssignedDevice
from kvplace.domainxml.rewriting import devices_of, rewrite, unpin

__all__ = ["MAX_DOMAIN_BYTES", "AssignedDevice", "devices_of", "rewrite", "unpin"]
