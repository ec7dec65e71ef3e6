"""TrainingConfig and TrainerConfig: the settings of the Python API."""
