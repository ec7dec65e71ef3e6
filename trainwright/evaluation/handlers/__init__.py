"""Metrics handlers compute named numbers from a model's outputs and the labels; one handler per task."""
