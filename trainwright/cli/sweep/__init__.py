"""Several runs of a configuration: ``trainwright train CONFIG optim.lr=0.1,0.01 --sweep``."""
