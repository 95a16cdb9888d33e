"""The web map: what `serve` knows of the cluster, for people with a browser; it changes nothing.

Everything is read from the stores that `serve` keeps anyway. The cluster decides who may read it: see
`gate`.
"""
