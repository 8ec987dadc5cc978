"""Files that are no manifest: one sentence each, whatever the bytes."""

from pathlib import Path
from typing import Any

import pytest

from tracerl.api.errors import InputError
from tracerl.api.load import check, read_manifest
from tracerl.api.manifest import MAX_BYTES, parse_yaml

BOMB = "a0: &a0 x\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 30)
)

FILES: list[tuple[str, bytes, str]] = [
    ("empty", b"", "is empty; write a job manifest"),
    ("comment", b"# nothing\n", "is empty"),
    ("null", b"null", "is empty"),
    ("list", b"- a\n", "holds a list, not a job"),
    ("text", b"hello", "holds a single value"),
    ("binary", b"\x7fELF\x02\x01\x80\xff", "is not UTF-8 text (byte 6)"),
    ("control", b"a: \x01", "special characters are not allowed"),
    ("syntax", b"a: 1\nb: [1\n", "line 3, column 1"),
    ("tab", b"a:\n\t- b\n", "line 2, column 1"),
    ("duplicate", b"a:\n  b: 1\n  b: 2\n", 'line 3, column 3: the key "b" is there twice'),
    ("documents", b"a: 1\n---\nb: 2\n", "holds 2 YAML documents"),
    ("merge", b"a: &a {x: 1}\nb: {<<: *a}\n", "merge keys (<<) are not supported"),
    ("merge bomb", BOMB.encode(), "merge keys (<<) are not supported"),
    ("python tag", b"a: !!python/object/apply:os.system [ls]\n", "could not determine a constructor"),
    ("complex key", b"? [a, b]\n: 1\n", "a key is not text"),
    ("deep", b"[" * 100_000, "nested too deeply"),
    ("digits", b"a: " + b"1" * 5000, "put it in quotes"),
    ("empty int", b'a: !!int ""', "put it in quotes"),
    ("bad bool", b"a: !!bool maybe", "put it in quotes"),
    ("bad float", b"a: !!float abc", "put it in quotes"),
    ("not a map", b"a: !!map abc", "put it in quotes"),
    ("alias", b"a: *b\n", "undefined alias"),
    ("large", b"a: " + b"x" * MAX_BYTES, "is larger than 256 KiB"),
]


@pytest.mark.parametrize(("name", "data", "fragment"), FILES, ids=[name for name, _, _ in FILES])
def test_file_that_is_no_manifest(tmp_path: Path, name: str, data: bytes, fragment: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(data)
    with pytest.raises(InputError) as error:
        read_manifest(path)
    sentence = str(error.value)
    assert fragment in sentence
    assert str(path) in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("path", ["nowhere.yaml", ".", "a\0b", "/dev/zero", "x" * 5000])
def test_path_that_is_no_file(tmp_path: Path, path: str) -> None:
    with pytest.raises(InputError) as error:
        read_manifest(path if path.startswith("/") else f"{tmp_path}/{path}")
    assert "\n" not in str(error.value)


def test_what_is_read(tmp_path: Path) -> None:
    """A byte-order mark is skipped; dates stay text, since JSON has none; anchors work."""
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbf---\na: &x 2026-01-01\nb: *x\nc: {d: 1.5, e: [null, true]}\n")
    assert read_manifest(path) == {
        "a": "2026-01-01",
        "b": "2026-01-01",
        "c": {"d": 1.5, "e": [None, True]},
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E3", 1000.0),
        (".5e2", 50.0),
        ("-1e-8", -1e-8),
        ("08", 8.0),
        ("0o17", 15),
        ("12", 12),
        ("0.001", 0.001),
        ('"1e-3"', "1e-3"),
        ("1e", "1e"),
        ("1.2.3", "1.2.3"),
        ("256Mi", "256Mi"),
    ],
)
def test_a_number_of_yaml_1_2_is_a_number(text: str, value: object) -> None:
    """PyYAML alone reads 1e-3 as text, and kubectl sends it as a number."""
    read = parse_yaml(f"a: {text}", "job.yaml")["a"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("text", ["0.001", "1e-3", "1.e-3", "10e-4"])
def test_a_decimal_without_quotes_is_refused(manifest: dict[str, Any], text: str) -> None:
    rate = parse_yaml(f"learningRate: {text}", "job.yaml")
    manifest["spec"].setdefault("trainer", {})["optimizer"] = rate
    assert [str(fault) for fault in check(manifest)] == [
        'spec.trainer.optimizer.learningRate: is the number 0.001 without quotes; write it in quotes: "0.001"'
    ]
