"""Every use of a private part of torch: one file each, with a probe and a public fallback.

A private part may change with any release of torch. Before a training uses one, a probe runs it once on a toy and
compares the result with the known one. If that fails for any reason, the public API is used for the rest of the
process, and one log line says so.
"""
