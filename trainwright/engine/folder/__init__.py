"""The output folder of a run: its lock, earlier runs in it, its files, its record and its summary."""
