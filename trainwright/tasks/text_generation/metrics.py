"""The metrics handler of text generation."""

from trainwright.tasks.metrics import TextsMetricsHandler


class TextGenerationMetricsHandler(TextsMetricsHandler):
    """Overlap of generated texts with their references."""

    shifts_labels = True

    valid_metrics = ("rouge", "bleu")
    default_metrics = ("rouge",)
