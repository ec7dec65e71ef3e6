"""Metrics over complete data sets by name, and torchmetrics' for every step."""
