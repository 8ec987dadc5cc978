"""What the tests of `make test` want of their process."""

import signal

import pytest

with pytest.MonkeyPatch.context() as patch:
    # Triton makes its own functions for its interpreter when it is imported, which other tests do by the way.
    patch.setenv("TRITON_INTERPRET", "1")
    import triton.language  # noqa: F401


def pytest_configure() -> None:
    """Hear Ctrl-C also where a shell has started the tests in the background, and so to ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
