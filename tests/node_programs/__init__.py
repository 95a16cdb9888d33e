"""The container images and programs of a real node, and how they are built and kept."""
