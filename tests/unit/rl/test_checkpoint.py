"""Checkpoints: whole or not there, whatever kills the writer or damages the files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tracerl.api.errors import JobError
from tracerl.engines.base import Cut
from tracerl.rl.checkpoint import (
    Checkpoint,
    Checkpoints,
    Measure,
    StoredTensors,
    measure,
    shard_name,
    write_tensors,
)


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {
        "weights": torch.full((3, 2), float(step)),
        "moments": torch.arange(4, dtype=torch.bfloat16) + step,
    }


def save(directory: Path, step: int, keep: int = 2, *, sharded: bool = False) -> None:
    checkpoints, loop = Checkpoints(directory, keep=keep), {"step": step, "share": 0.1 + step}
    if sharded:
        checkpoints.write(step, loop, lambda place: write_shards(place, step))
    else:
        checkpoints.save(step, tensors(step), loop)


def write_shards(place: Path, step: int) -> dict[str, Measure]:
    """As three ranks do, of which one holds nothing: rows of one tensor apart, another one whole."""
    weights, moments = tensors(step).values()
    held = {0: {"weights": weights[:1]}, 2: {"weights": weights[1:], "moments": moments}}
    return {
        shard_name(rank): write_tensors(place / shard_name(rank), of_rank, {"weights": Cut(0, 2)})
        for rank, of_rank in held.items()
    }


def load(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    said: list[str] = []
    return Checkpoints(directory, keep=2).load(said.append), said


def expect_step(directory: Path, step: int) -> list[str]:
    found, said = load(directory)
    assert found is not None
    assert (found.step, found.loop) == (step, {"step": step, "share": 0.1 + step})
    for name, tensor in tensors(step).items():
        assert torch.equal(found.tensors[name], tensor)
        assert found.tensors[name].dtype == tensor.dtype
    return said


def test_nothing_there(tmp_path: Path) -> None:
    assert load(tmp_path / "none") == (None, [])
    assert load(tmp_path) == (None, [])


def test_the_newest_of_those_kept(tmp_path: Path) -> None:
    for step in (9, 10, 100, 1_000_000):
        save(tmp_path, step)
    assert expect_step(tmp_path, 1_000_000) == []
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-000100", "step-1000000"]


def test_files_of_ranks_are_one_checkpoint(tmp_path: Path) -> None:
    """Also beside one of a single file; the next one is of a single file again."""
    save(tmp_path, 1)
    save(tmp_path, 2, sharded=True)
    assert sorted(path.name for path in (tmp_path / "step-000002").iterdir()) == [
        "loop.json",
        "manifest.json",
        "state-rank-00000.safetensors",
        "state-rank-00002.safetensors",
    ]
    assert expect_step(tmp_path, 2) == []
    save(tmp_path, 3)
    assert expect_step(tmp_path, 3) == []


def one_part(weights: torch.Tensor, cut: Cut | None) -> tuple[dict[str, torch.Tensor], dict[str, Cut]]:
    return {"weights": weights}, {} if cut is None else {"weights": cut}


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([((1, 2), Cut(0, 3)), ((2, 2), Cut(0, 3))], "hold 2 parts of weights, which has 3"),
        (
            [((1, 2), Cut(0, 2)), ((2, 2), Cut(0, 2)), ((1, 2), Cut(0, 2))],
            "hold 3 parts of weights, which has 2",
        ),
        ([((1, 2), None), ((1, 2), None)], "hold 2 parts of weights, which has 1"),
        ([((1, 2), Cut(0, 2)), ((1, 2), Cut(1, 2))], "do not agree how weights is cut"),
        ([((1, 2), Cut(0, 2)), ((2, 3), Cut(0, 2))], "the parts of weights do not fit together"),
    ],
)
def test_parts_that_do_not_fit_are_damage(
    tmp_path: Path, parts: list[tuple[tuple[int, int], Cut | None]], said: str
) -> None:
    save(tmp_path, 1)

    def write(place: Path) -> dict[str, Measure]:
        return {
            shard_name(rank): write_tensors(place / shard_name(rank), *one_part(torch.ones(size), cut))
            for rank, (size, cut) in enumerate(parts)
        }

    Checkpoints(tmp_path, keep=2).write(2, {"step": 2}, write)
    (sentence,) = expect_step(tmp_path, 1)
    assert said in sentence


@pytest.mark.parametrize("cuts", ["[", '{"weights": 3}', '{"weights": ["0", 1]}', '{"weights": [0]}'])
def test_cuts_of_anything_else_are_damage(tmp_path: Path, cuts: str) -> None:
    path = tmp_path / "state.safetensors"
    save_file({"weights": torch.ones(1, 2)}, path, metadata={"cuts": cuts})
    with pytest.raises((ValueError, TypeError, LookupError)):
        StoredTensors([path])


def test_a_part_is_cut_along_any_axis(tmp_path: Path) -> None:
    """Eleven of them: files of ranks are in the order of numbers."""
    whole = torch.arange(66, dtype=torch.float32).view(3, 22)

    def write(place: Path) -> dict[str, Measure]:
        return {
            shard_name(rank): write_tensors(place / shard_name(rank), {"w": part}, {"w": Cut(1, 11)})
            for rank, part in enumerate(whole.chunk(11, dim=1))
        }

    Checkpoints(tmp_path, keep=1).write(1, {"step": 1}, write)
    found, _ = load(tmp_path)
    assert found is not None
    assert torch.equal(found.tensors["w"], whole)


def run_and_kill(directory: Path, kill_at: int | None, *, sharded: bool) -> int:
    """Save step 3 over steps 1 and 2 in a child that dies at a file operation; returns how many it did."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        count = 0

        def audit(event: str, _: tuple[object, ...]) -> None:
            nonlocal count
            if event in {
                "open",
                "os.mkdir",
                "os.rename",
                "os.remove",
                "os.rmdir",
                "shutil.rmtree",
                "os.listdir",
            }:
                count += 1
                if count == kill_at:
                    os._exit(9)

        sys.addaudithook(audit)
        save(directory, 3, sharded=sharded)
        os.write(writer, str(count).encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    assert (status != 0) == (kill_at is not None)
    with os.fdopen(reader) as pipe:
        return int(pipe.read() or 0)


@pytest.mark.parametrize("sharded", [False, True])
def test_killed_at_every_file_operation(tmp_path: Path, sharded: bool) -> None:
    total = 0
    for kill_at in [None, *range(1, 1_000)]:
        if total and kill_at is not None and kill_at > total:
            break
        directory = tmp_path / str(kill_at)
        save(directory, 1)
        save(directory, 2, sharded=sharded)
        operations = run_and_kill(directory, kill_at, sharded=sharded)
        if kill_at is None:
            total = operations
            assert total > 10
        found, said = load(directory)
        assert found is not None
        assert said == []
        assert expect_step(directory, found.step) == []
        assert found.step in {2, 3}
        # Leftovers are gone, and the directory takes the next checkpoint.
        assert not [entry for entry in directory.iterdir() if entry.name.startswith(".")]
        save(directory, 4)
        assert expect_step(directory, 4) == []


@pytest.mark.parametrize(
    "name", ["state.safetensors", "state-rank-00002.safetensors", "loop.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, sharded="rank" in name)
    path = tmp_path / "step-000002" / name
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    said = expect_step(tmp_path, 1)
    assert len(said) == 1
    assert said[0].startswith(f"checkpoint {tmp_path / 'step-000002'} is damaged")
    assert said[0].endswith("continuing from the one before it")
    # Training comes to step 2 again.
    save(tmp_path, 2)
    assert expect_step(tmp_path, 2) == []


def forge(path: Path, step: int, loop: object, *, files: dict[str, object] | None = None) -> None:
    """Write a manifest that fits the files of a checkpoint whose loop.json says `loop`."""
    (path / "loop.json").write_text(json.dumps(loop))
    measured = {name: measure(path / name) for name in ("state.safetensors", "loop.json")}
    document = {"format": 1, "step": step, "files": measured if files is None else files}
    (path / "manifest.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("step", "loop", "files"),
    [
        (3, {"step": 2}, None),
        (3, {"step": 3}, None),
        (2, {"step": 3}, None),
        (2, {}, None),
        (2, [], None),
        (2, {"step": 2}, {}),
        (2, {"step": 2}, ["state.safetensors", "loop.json"]),
        (2, {"step": 2}, {"../step-000001/loop.json": []}),
        (2, {"step": 2}, {"loop.json": [11, ""], "../step-000001/state.safetensors": [0, ""]}),
        (2, {"step": 2}, {"loop.json": [11, ""], "state-rank-1.safetensors": [0, ""]}),
        (2, {"step": 2}, {"loop.json": [11, ""], "manifest.json": [0, ""]}),
        (2, {"step": 2}, {"loop.json": [11, ""], "state.safetensors": [0, ""], "more": [0, ""]}),
        ("2", {"step": "2"}, None),
        (None, {"step": None}, None),
    ],
)
def test_a_manifest_that_tells_of_something_else_is_damage(
    tmp_path: Path, step: Any, loop: object, files: Any
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    forge(tmp_path / "step-000002", step, loop, files=files)
    (said,) = expect_step(tmp_path, 1)
    assert said.startswith(f"checkpoint {tmp_path / 'step-000002'} is damaged (")


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "3", '"format"', '{"format": 2}', "\xff"])
def test_a_manifest_of_anything_else_is_damage(tmp_path: Path, text: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "step-000002" / "manifest.json").write_text(text, encoding="latin-1")
    assert len(expect_step(tmp_path, 1)) == 1


def test_one_step_has_one_name(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "step-000002").rename(tmp_path / "step-0000002")
    assert len(expect_step(tmp_path, 1)) == 1


def test_leftovers_that_cannot_be_removed_do_not_stop_a_resume(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / ".step-000002.partial").write_text("a file, where a directory is removed")
    assert expect_step(tmp_path, 1) == []


def test_a_directory_that_cannot_be_listed_is_one_sentence(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    child = os.fork()
    if child == 0:
        tmp_path.chmod(0)
        if os.geteuid() == 0:
            os.seteuid(65534)  # root reads everything
        try:
            load(tmp_path / "run")
        except JobError as error:
            os._exit(0 if "cannot be listed (Permission denied)" in str(error) else 3)
        os._exit(4)
    _, status = os.waitpid(child, 0)
    tmp_path.chmod(0o700)
    assert os.waitstatus_to_exitcode(status) == 0
    # A run that starts over would have thrown away what is there.
    assert expect_step(tmp_path / "run", 1) == []


def test_all_damaged(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-000001" / "loop.json").write_text("{}")
    found, said = load(tmp_path)
    assert found is None
    assert said[0].endswith("continuing from the beginning")


def test_a_full_disk_is_one_sentence_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    save(tmp_path, 1)
    child = os.fork()
    if child == 0:
        import resource

        # A file may not grow beyond 100 bytes, which looks to the writer as a quota does; a module's bytecode
        # would be cut off without an error, and nobody could import it.
        sys.dont_write_bytecode = True
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            save(tmp_path, 2)
        except JobError as error:
            text = str(error)
            named = text.startswith(f"{tmp_path / 'step-000002'} cannot be written (")
            os._exit(0 if named and error.reason == "CheckpointFailed" else 3)
        os._exit(4)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-000001"]
    assert expect_step(tmp_path, 1) == []
