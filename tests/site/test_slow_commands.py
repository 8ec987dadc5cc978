"""Commands of the documentation that train: those marked slow."""

from __future__ import annotations

from pathlib import Path

import pytest
from documented_commands import Block, all_marked, run_block


@pytest.mark.parametrize("block", all_marked(slow=True), ids=lambda block: block.name)
def test_it_runs(block: Block, tmp_path: Path) -> None:
    run_block(block, tmp_path)
