"""kvplace gives a KubeVirt VM the right physical CPU cores, and gives none of them away twice."""

__version__ = "0.1.0"
