"""Lazy configurations: calls that config files describe, that can be changed and saved, and that a run makes."""
