"""``trainwright doctor``: check a machine, or the hosts of a run and the network between them."""
