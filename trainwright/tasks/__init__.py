"""Tasks of texts, images and recordings: data sets, preprocessors, collators, reference models, metrics handlers."""
