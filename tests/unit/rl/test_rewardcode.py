"""Fetching reward code: what may come from where, and what is refused before anything is imported."""

from __future__ import annotations

import io
import stat
import zipfile
from pathlib import Path

import pytest

from tracerl.rl import rewardcode
from tracerl.rl.rewardcode import CodeError, fetch_code

CODE = "def score(completion, item):\n    return 1.0\n"


def packed(*members: tuple[str | zipfile.ZipInfo, bytes | str]) -> bytes:
    """A zip file written by the standard library."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return buffer.getvalue()


def link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


def tree(directory: Path) -> dict[str, str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_text() for path in files}


@pytest.mark.parametrize(
    ("files", "uri", "found"),
    [
        ({"anything.txt": CODE}, "anything.txt", {"a/reward.py": CODE}),
        ({"r.py": ""}, "r.py", {"a/reward.py": ""}),
        (
            {"r.zip": packed(("a/", ""), ("a/reward.py", CODE), ("words.txt", "x"))},
            "r.zip",
            {"a/reward.py": CODE, "words.txt": "x"},
        ),
        (
            {"d/a/reward.py": CODE, "d/b.txt": "x", "d/a/__pycache__/reward.pyc": "x"},
            "d",
            {"a/reward.py": CODE, "b.txt": "x"},
        ),
    ],
)
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_what_is_fetched(
    tmp_path: Path, files: dict[str, str | bytes], uri: str, found: dict[str, str], scheme: str
) -> None:
    for name, content in files.items():
        path = tmp_path / "from" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    target = tmp_path / "to"
    target.mkdir()
    (target / "of_an_earlier_start.py").touch()
    fetch_code(f"{scheme}{tmp_path}/from/{uri}", "a.reward", target, {})
    assert tree(target) == found


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"def f(:\n", "neither Python nor a zip file .*line 1"),
        (b"a = 1\0", "neither Python nor a zip file"),
        (b"\x7fELF\xff", "neither Python nor a zip file"),
        (packed(("../reward.py", CODE)), "named '../reward.py', which leads elsewhere"),
        (packed(("a/../../reward.py", CODE)), "leads elsewhere"),
        (packed(("/etc/reward.py", CODE)), "leads elsewhere"),
        (packed(("..\\reward.py", CODE)), "leads elsewhere"),
        (packed((link("reward.py"), "/etc/passwd")), "'reward.py', which is no regular file"),
        (packed(("reward.py", "x" * 5_000)), "more than 0 MiB unpacked"),
        (b"#" * 3_000, "a file of more than 0 MiB"),
        (packed(*((f"f{n}.py", "") for n in range(6))), "more than 5 files"),
        (packed(("reward.py", CODE)).replace(CODE[:10].encode(), b"x"), "damaged zip file|cannot be read"),
    ],
)
def test_what_is_refused(monkeypatch, tmp_path: Path, data: bytes, words: str) -> None:
    monkeypatch.setattr(rewardcode, "_FILE_BYTES", 2_000)
    monkeypatch.setattr(rewardcode, "_ALL_BYTES", 4_000)
    monkeypatch.setattr(rewardcode, "_FILES", 5)
    if b"damaged" in words.encode():
        data = data[:40] + bytes(8) + data[48:]
    (tmp_path / "code").write_bytes(data)
    with pytest.raises(CodeError, match=words):
        fetch_code(str(tmp_path / "code"), "reward", tmp_path / "to", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code", "to"]
    assert not Path("/etc/reward.py").exists()


def test_an_address_without_anything(tmp_path: Path) -> None:
    with pytest.raises(CodeError, match=r"cannot be read .*check the address"):
        fetch_code(str(tmp_path / "code.py"), "reward", tmp_path / "to", {})
