"""`-w N`: a supervisor, its worker processes, and what these share.

docs/decisions/0004-workers.md says why it is as it is.
"""
