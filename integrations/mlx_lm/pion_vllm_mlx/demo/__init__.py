"""`python -m pion_vllm_mlx.demo`: a prefix prefilled in one process, restored in another."""
