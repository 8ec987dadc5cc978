"""These tests need a GPU, and say so where there is none."""

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available():
        raise pytest.UsageError(
            f"PyTorch {torch.__version__} sees no GPU here; run these tests where an NVIDIA GPU is"
        )
