"""Reference models of the tasks that the documents name."""
