"""The command table: one registry, one dispatcher, one file a family."""
