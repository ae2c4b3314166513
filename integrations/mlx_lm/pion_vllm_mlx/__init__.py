"""Pion for mlx-lm: prompt caches that any process gets back instead of prefilling again."""
