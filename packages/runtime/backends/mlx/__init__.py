"""Targets run by mlx-lm on MLX: Apple silicon, and any CPU that the `mlx` extra installs on. One sequence at a time, float32."""
