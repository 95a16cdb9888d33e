"""The web map: who may look, what he is shown, and how it stays true."""
