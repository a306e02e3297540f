"""From YAML to one checked record: strict files, layers, interpolation, the schema, names of shipped files."""
