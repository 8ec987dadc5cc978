"""What the documentation says to try with an S3 server on one's own machine, on a network of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from documented_commands import Block, all_marked, run_block

NETWORK = ["unshare", "--net", "--map-root-user", "sh", "-ec", 'ip link set lo up && exec "$@"', "sh"]
"""Runs what follows where all ports are free."""


@pytest.mark.timeout(900)  # the first job of a machine warms up
def test_the_server_and_the_job_of_the_page_on_object_stores(tmp_path: Path) -> None:
    if subprocess.run([*NETWORK, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a network of its own, or iproute2 is missing")
    first, *others = all_marked("s3")
    script = "\n".join(["trap 'kill $(jobs -p)' EXIT", first.script, *(block.script for block in others)])
    (tmp_path / "runs").mkdir()
    said = run_block(
        Block(first.page, first.number, script, first.place),
        tmp_path,
        {"HOME": str(tmp_path)},
        through=NETWORK,
    )
    frames = said.splitlines()[-1]
    assert "frames" in frames
    assert "damaged" not in frames
    assert [*(tmp_path / "runs/s3-server").iterdir()]
    assert (tmp_path / "runs/s3/summary.json").exists()
