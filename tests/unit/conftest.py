"""What the tests of `make test` want of their process."""

import signal


def pytest_configure() -> None:
    """Hear Ctrl-C also where a shell has started the tests in the background, and so to ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
