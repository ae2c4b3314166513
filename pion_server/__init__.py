"""Pion: a small Redis-protocol server that keeps K/V tensors, and the client the connectors use."""

__version__ = "0.1.0"
DEFAULT_PORT = 1974
