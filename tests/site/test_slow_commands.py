"""Commands of the documentation that train: those marked slow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from documented_commands import Block, all_marked, run_block


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all, as a user has: whoever comes first warms up."""
    named = os.environ.get("TRACERL_CACHE")
    return Path(named) if named else tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("block", all_marked("slow"), ids=lambda block: block.name)
def test_it_runs(block: Block, tmp_path: Path, cache: Path) -> None:
    run_block(block, tmp_path, {"TRACERL_CACHE": str(cache)})
