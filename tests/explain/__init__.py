"""The explanations about one VM."""
