"""What the API server asks before it stores a VM, a VMI or a pod.

An object that asks kvplace for nothing leaves as it came. Decisions are pure functions of the objects; only
`http` touches the network, and only to answer.
"""
