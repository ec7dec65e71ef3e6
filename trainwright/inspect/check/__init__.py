"""Checks of a set-up, each made on copies of a trainer: what would otherwise be found after hours of training."""
