"""The web map: what `serve` knows of the cluster, for people with a browser; it changes nothing.

Everything is read from the stores that `serve` keeps anyway. Who may look is decided by the cluster: see
`gate`.
"""
