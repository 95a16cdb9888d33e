"""Documents that people write, in YAML or JSON: read within limits, checked, described by JSON Schemas."""
