"""Reading machines and clusters from whatever describes them."""
