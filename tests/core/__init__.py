"""Values and decisions, without any input or output."""
