"""One process of a run without the others and without data: what its step needs is counted, not computed."""
