"""From YAML to one checked record: strict files, layers, interpolation, the schema, the names of what is shipped."""
