"""Ring: programs that look at a run or a trainer: checks, finders, estimates, replay, reports, doctor."""
