"""The web map: the right to it, its content, and how it stays true."""
