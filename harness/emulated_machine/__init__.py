"""Machines of other shapes than the one that runs the tests: QEMU boots Debian's kernel on the same files.

A guest has the sockets, NUMA nodes, caches, threads and memory that a `Shape` names, cgroup version 2 with
its cpuset controller, and the files of this machine, which it cannot change. Tests call Python functions of
this project in it. No root and no KVM are needed.
"""
