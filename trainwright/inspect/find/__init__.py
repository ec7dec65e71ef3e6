"""A learning rate and a batch size, found by trials on copies of a trainer."""
