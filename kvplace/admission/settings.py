"""The operator's settings for admission."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """The names that admission writes into objects."""

    sidecar_image: str
    """Image of the hook sidecar; its program is `kvplace-hook`."""
    scheduler_name: str = "kvplace-scheduler"
    """Scheduler of pods that do not name one."""
    kubevirt_controller: str = "system:serviceaccount:kubevirt:kubevirt-controller"
    """The user as which virt-controller creates the pods of VMs."""
    other_schedulers: tuple[str, ...] = ()
    """Further schedulers that call our extender; pods may name them."""
