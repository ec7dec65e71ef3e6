"""Config files: the sections and keys of a run, their defaults, types and checks."""
