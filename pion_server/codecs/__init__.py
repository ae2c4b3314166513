"""Rows <-> bytes: one `Codec` per storage format, looked up by name (wire) or by number (disk)."""
