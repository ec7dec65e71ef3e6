"""The metrics handler of speech recognition."""

from trainwright.tasks.metrics import TextsMetricsHandler


class SpeechRecognitionMetricsHandler(TextsMetricsHandler):
    """Error rates of transcribed speech."""

    valid_metrics = ("cer", "wer")
    default_metrics = ("cer", "wer")
