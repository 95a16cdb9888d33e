"""The web map: a cluster in a browser, read with the rights of the user who started it; it changes nothing.

It watches the cluster as `serve` does, and shares nothing else with it. Only this machine can ask it, and
there only clients that know the secret path: see `access`.
"""
