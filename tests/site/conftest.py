from __future__ import annotations

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

ROOT = Path(__file__).resolve().parents[2]
SCREENS = ROOT / ".cache/site-screens"
"""Pictures of key pages, to look at."""


class Browser:
    """Headless Chromium, and what went wrong in it."""

    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        for argument in (
            "headless=new",
            "no-sandbox",
            "disable-gpu",
            "disable-dev-shm-usage",
            "hide-scrollbars",
        ):
            options.add_argument(f"--{argument}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = Service(shutil.which("chromedriver"))
        self.driver = webdriver.Chrome(options=options, service=service)
        self.driver.set_page_load_timeout(180)

    def open(self, address: str, scheme: str = "light", size: tuple[int, int] = (1280, 900)) -> list[str]:
        """Open a page in a colour scheme; the browser's complaints."""
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self.driver.set_window_size(*size)
        self.driver.get(address)
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def ask(self, script: str) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script)

    def fetched(self) -> list[str]:
        """Addresses of everything that the page loaded."""
        addresses: list[str] = self.ask("return performance.getEntriesByType('resource').map(e => e.name)")
        return addresses

    def picture(self, name: str) -> None:
        """Keep what is to be seen, the whole height of the page up to 3,000 pixels."""
        SCREENS.mkdir(parents=True, exist_ok=True)
        height = min(int(self.ask("return document.documentElement.scrollHeight")), 3000)
        self.driver.set_window_size(1280, height)
        self.driver.save_screenshot(str(SCREENS / f"{name}.png"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    assert not missing, f"{' and '.join(missing)} are not installed; make test-site says how to get them"
    browser = Browser()
    yield browser
    browser.driver.quit()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The documentation as `make site` builds it, served on a port of this machine: address, directory."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    done = subprocess.run(
        [*command, "--config-file", "site/mkdocs.yml", "--site-dir", str(target)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    handler = functools.partial(Quiet, directory=str(target))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", target
        server.shutdown()
        thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Says nothing of what it serves."""

    def log_message(self, *_: object) -> None:
        pass
