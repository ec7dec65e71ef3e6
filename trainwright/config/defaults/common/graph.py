"""Whether each update is one compiled program. Read by get_config("common/graph.py").graph."""
# ruff: noqa: C408 - settings read better as keyword arguments

graph = dict(
    enabled=False,
    # A backend of torch.compile: "inductor" (fast), "aot_eager" (needs no compiler).
    backend="inductor",
)
