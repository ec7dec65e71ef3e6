"""Lazy configurations: calls that are described in files, changed, saved, and made when a run starts."""
