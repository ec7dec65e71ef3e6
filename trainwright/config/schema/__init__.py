"""The keys of config files: their defaults, their types, and what is wrong with a configuration."""
