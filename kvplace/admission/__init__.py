"""Admission: reviews VMs, VMIs and pods before the API server stores them.

An object that asks kvplace for nothing leaves as it came. Decisions are pure functions of the objects; only
`http` touches the network, and only to answer.
"""
