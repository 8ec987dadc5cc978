"""Quick commands of the documentation do what the page says; other suites run the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from documented_commands import Block, all_marked, marked, run_block

QUICK = all_marked()


@pytest.mark.parametrize("block", QUICK, ids=lambda block: block.name)
def test_it_runs(block: Block, tmp_path: Path) -> None:
    assert run_block(block, tmp_path, {"TRACERL_CACHE": str(tmp_path / "cache")})


def test_pages_that_mark_commands_are_found() -> None:
    pages = {block.page.name for block in [*QUICK, *all_marked("slow"), *all_marked("cluster")]}
    assert pages >= {"gb200.md", "tune-layers-and-bits.md", "run-locally.md", "dashboards.md"}


def test_a_prompt_is_not_a_part_of_a_command(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "1. Do:\n   <!-- runnable -->\n   ```console\n   $ echo a \\\n       b\n   a b\n   $ true\n   ```\n"
    )
    assert [block.script for block in marked(page)] == ["echo a \\\n    b\ntrue"]


def test_a_command_that_fails_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ended with 2"):
        run_block(Block(Path(__file__), 0, "tracerl plan nowhere.yaml | cat\ntrue", ""), tmp_path, {})
