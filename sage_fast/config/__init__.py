"""The settings of a run: `schema` is their typed tree, `fields` checks each one, `load` reads YAML
and options."""
