"""Every warning and error of a log is explained by its words, and nothing else is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/log-lines.md"
SOURCES = [ROOT / "jobs/tracerl", ROOT / "operator/tracerl_operator"]
_LOGGERS = {"log", "_log", "_LOG"}
_LEVELS = {"warning", "error", "exception", "critical"}


def lines_of(source: str) -> set[str]:
    """What a module writes as a warning or worse, with … for what is put in; ValueError without a text."""
    found = set()
    for call in ast.walk(ast.parse(source)):
        match call:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=level), args=[words, *_]) if (
                name in _LOGGERS and level in _LEVELS
            ):
                if not (isinstance(words, ast.Constant) and isinstance(words.value, str)):
                    raise ValueError(f"line {call.lineno} logs {ast.unparse(words)}, which is no text")
                found.add(re.sub(r"%[.\d]*[a-z]", "…", words.value))
    return found


def written() -> set[str]:
    paths = [path for directory in SOURCES for path in directory.rglob("*.py")]
    # A sentence alone ("%s") is an error's own.
    return set().union(*(lines_of(path.read_text(encoding="utf-8")) for path in paths)) - {"…"}


def test_log_lines_are_explained() -> None:
    explained = re.findall(
        r"^\| `(.+?)` \| .{9,} \| .{7,} \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(explained) == len(set(explained))
    assert set(explained) == written()


def test_what_a_module_logs() -> None:
    source = 'log.info("a")\n_log.error("%d of %.1f s", 1, 2)\n_LOG.exception("b %r", c)\nx.error("d")\n'
    assert lines_of(source) == {"… of … s", "b …"}
    with pytest.raises(ValueError, match=r"line 1 logs f'\{x\}'"):
        lines_of('log.warning(f"{x}")')


def test_loggers_have_names_that_are_looked_for() -> None:
    named = re.compile(r"^(\w+) = logging\.getLogger\(__name__\)$", re.MULTILINE)
    texts = [path.read_text(encoding="utf-8") for directory in SOURCES for path in directory.rglob("*.py")]
    assert {name for text in texts for name in named.findall(text)} == _LOGGERS
