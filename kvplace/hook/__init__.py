"""The sidecar that KubeVirt asks before it defines a domain.

There is one process per VM, hundreds in a cluster, so it must be small: the server has an HTTP/2 library and
little else, and answers each `OnDefineDomain` in a short-lived forked process that reads the placement and
loads the XML library.

It starts with a fifth of a core. So modules that the server and the probe import at start avoid pathlib,
and their values are named tuples: defining one takes a fifth of the time of a dataclass.
"""
