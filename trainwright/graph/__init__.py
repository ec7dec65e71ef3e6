"""Graph mode: a complete update as one compiled program."""
