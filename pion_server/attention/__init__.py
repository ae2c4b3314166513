"""Attention over stored K/V: math over views of the store, on one of two backends."""
