"""The samples with the largest losses of an evaluation: ``search`` finds them, ``table`` writes and shows them."""
