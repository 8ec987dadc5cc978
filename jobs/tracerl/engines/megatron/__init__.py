"""The trainer on Megatron-Core: its model, optimizer and checkpoints, with guided four-bit emulation inside.

Megatron is imported in this package alone, and not changed: layer spec, subclasses and arguments do it all.
"""

import warnings

# Advice for speed, a dozen times at import; what runs without them computes the same.
warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*not installed", category=UserWarning)
