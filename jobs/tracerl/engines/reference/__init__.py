"""The reference engine: a small torch Qwen3-MoE that generates and trains on a CPU."""
