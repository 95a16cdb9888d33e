"""Documents that people write in YAML or JSON: read within limits, checked by models with a JSON Schema."""
