"""Finders: a learning rate and a batch size, by trials on copies of a trainer."""
