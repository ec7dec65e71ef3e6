"""Every use of a private part of torch: one file each, with a probe and the public way.

A private part may change with any release of torch. So before a training uses one, a probe runs it once on a toy and
compares the result with the known one. Where that fails, whatever the reason, the public way is taken for the rest of
the process, and one log line says so.
"""
