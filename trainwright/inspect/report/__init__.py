"""Reports about runs, read from their folders. Loads no torch."""
