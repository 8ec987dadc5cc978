"""Reinforcement learning: tasks, GRPO, the ratio contract, checkpoints and the asynchronous loop."""
