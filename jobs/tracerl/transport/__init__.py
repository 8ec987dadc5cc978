"""How record frames travel from rollout to trainer: opaque bytes under location-independent handles."""
