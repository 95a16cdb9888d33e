"""kvplace gives a KubeVirt VM the right physical CPU cores and proves that it has them."""

__version__ = "0.1.0"
