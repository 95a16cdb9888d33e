"""The sidecar that KubeVirt asks before it defines a domain.

One small process per VM, so its size counts hundreds of times over: the server keeps an HTTP/2 library and
little else, and answers each `OnDefineDomain` in a short-lived forked process that reads the placement,
loads the XML library and is gone with all its memory once the answer is sent.

A start is paid by every VM, at a fifth of a core: what the server and the probe import at once does without
pathlib and, for its values, takes named tuples, each of which is made in a fifth of a dataclass's time.
"""
