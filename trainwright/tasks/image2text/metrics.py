"""The metrics handler of image to text."""

from trainwright.tasks.metrics import TextsMetricsHandler


class Image2TextMetricHandler(TextsMetricsHandler):
    """Error rates of the texts read in images."""

    valid_metrics = ("cer", "wer")
    default_metrics = ("cer",)


Image2TextMetricsHandler = Image2TextMetricHandler
