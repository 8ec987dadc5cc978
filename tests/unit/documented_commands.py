"""Commands of the documentation that tests run: those in a block below `<!-- runnable -->`.

`<!-- runnable: slow -->` is for what takes more than some seconds; tests/site runs those. What wants
kubectl or Helm is `<!-- runnable: cluster -->`, for tests/cluster, and what wants an S3 server
`<!-- runnable: s3 -->`, for tests/transport.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_MARKED = re.compile(
    r"^ *<!-- runnable(?:: (?P<place>slow|cluster|s3))? -->\n(?P<indent> *)```(?P<language>console|bash)\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """One marked block of a page."""

    page: Path
    number: int
    script: str
    place: str
    """slow, cluster, s3, or empty for what takes seconds and needs nothing."""

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}-{self.number}"


def marked(page: Path) -> list[Block]:
    """The blocks that a page marks; of console blocks the lines with a prompt, and what continues them."""
    found = []
    for number, match in enumerate(_MARKED.finditer(page.read_text(encoding="utf-8"))):
        lines = [line.removeprefix(match["indent"]) for line in match["text"].splitlines()]
        if match["language"] == "console":
            typed, goes_on = [], False
            for line in lines:
                if goes_on or line.startswith("$ "):
                    typed.append(line.removeprefix("$ "))
                    goes_on = line.endswith("\\")
            lines = typed
        assert lines, f"{page} marks a block without a command"
        found.append(Block(page, number, "\n".join(lines), match["place"] or ""))
    return found


def all_marked(place: str = "") -> list[Block]:
    """Those of README and docs/."""
    pages = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
    return [block for page in pages for block in marked(page) if block.place == place]


def run_block(block: Block, where: Path, variables: Mapping[str, str], *, through: Sequence[str] = ()) -> str:
    """Run a block as a user does who stands in the repository; what it printed.

    `variables` of the environment are added, such as the place where what outlives a run is kept. `through`
    is a command that runs what follows it.
    """
    for name in ("jobs", "charts"):
        (where / name).symlink_to(ROOT / name)
    environment = {**os.environ, **variables}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        [*through, "bash", "-eo", "pipefail", "-c", block.script],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{block.name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout
