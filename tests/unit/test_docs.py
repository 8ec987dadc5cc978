"""The documentation holds together: links lead somewhere, and every page can be reached from the index."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Local targets of a page with their fragments."""
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text(encoding="utf-8")))
    for target in _LINK.findall(text):
        if re.match(r"[a-z]+:", target) is None:
            path, _, fragment = target.partition("#")
            yield ((page.parent / path).resolve() if path else page), fragment


def anchors(page: Path) -> set[str]:
    """Fragments of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, fragment in links(page):
        assert target.exists(), target
        if fragment and target.suffix == ".md":
            assert fragment in anchors(target), f"{target}#{fragment}"


def test_every_page_can_be_reached_from_the_index() -> None:
    seen: set[Path] = set()
    waiting = [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page not in seen and page.exists():
            seen.add(page)
            waiting += [target for target, _ in links(page) if target.suffix == ".md"]
    assert {page for page in DOCS.rglob("*.md") if page not in seen} == set()


def test_decisions_are_numbered_without_gaps_and_listed_in_order() -> None:
    decisions = sorted(path.name for path in (DOCS / "decisions").glob("[0-9]*.md"))
    assert [int(name[:4]) for name in decisions] == list(range(1, len(decisions) + 1))
    index = (DOCS / "decisions" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\((\d{4}-[\w-]+\.md)\)", index) == decisions
    for name in decisions:
        first = (DOCS / "decisions" / name).read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith(f"# {name[:4]}: ")
