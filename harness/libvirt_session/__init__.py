"""A real libvirt daemon and real QEMU, run the way KubeVirt runs them in a pod, for tests of pins.

A user without capabilities, KubeVirt's qemu.conf, a cpuset of its own: a step that the session driver refuses
in a pod, it refuses here. Guests run under TCG, which has one thread per vCPU and so shows every affinity.
"""
