"""The parts of tasks: datasets, preprocessors, collators, tokenizers."""
