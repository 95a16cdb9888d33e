"""Migrates a VM between two libvirts."""

from __future__ import annotations

from typing import Any

from harness.libvirt_session.daemon import LibvirtSession


def migrate(handle: Any, target: LibvirtSession) -> None:
    """Migrate a paused domain as KubeVirt does: peer to peer, with its own document for the target."""
    import libvirt

    handle.migrateToURI3(
        target.uri,
        {
            libvirt.VIR_MIGRATE_PARAM_URI: f"unix://{target.folder}/migration",
            libvirt.VIR_MIGRATE_PARAM_DEST_XML: handle.XMLDesc(libvirt.VIR_DOMAIN_XML_MIGRATABLE),
        },
        libvirt.VIR_MIGRATE_LIVE | libvirt.VIR_MIGRATE_PEER2PEER | libvirt.VIR_MIGRATE_PAUSED,
    )
