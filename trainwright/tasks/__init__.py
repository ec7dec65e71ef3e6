"""The tasks that the documents name: data sets, preprocessors, collators, reference models, metrics handlers."""
