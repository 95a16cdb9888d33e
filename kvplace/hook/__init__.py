"""The sidecar that KubeVirt asks before it defines a domain.

There is one process per VM, hundreds in a cluster, so it must be small: the server has an HTTP/2 library and
little else, and answers each `OnDefineDomain` in a short-lived forked process that reads the placement and
loads the XML library.

It starts with a fifth of a core. So what the server and the probe import at start avoids pathlib, and its
values are named tuples, which take a fifth of the time to define that dataclasses take.
"""
