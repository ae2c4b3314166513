"""`pion-vllm-mlx serve`: mlx_lm.server with a prompt cache that any process may have filled."""
