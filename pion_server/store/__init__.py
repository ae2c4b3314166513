"""The state: namespaces and sessions of immutable rows, and plain keys. No clock, no I/O."""
