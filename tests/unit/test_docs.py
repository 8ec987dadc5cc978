"""The documentation holds together: links, the way to each page, jobs and commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tracerl.api.job import KIND
from tracerl.api.load import check
from tracerl.cli import _parser

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


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


def blocks(page: Path, language: str) -> Iterator[str]:
    """Fenced blocks of a page in a language."""
    for _, found, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if found == language:
            yield text


def jobs(page: Path) -> Iterator[dict[str, object]]:
    """YAML blocks of a page that are whole jobs."""
    for text in blocks(page, "yaml"):
        for document in yaml.safe_load_all(text):
            if isinstance(document, dict) and document.get("kind") == KIND:
                yield document


def commands(page: Path) -> Iterator[list[str]]:
    """Arguments of the tracerl commands that a page's console blocks show."""
    for text in blocks(page, "console"):
        for line in text.replace("\\\n", "").splitlines():
            _, prompt, command = line.partition("$ ")
            words = shlex.split(command, comments=True)
            if prompt and words[:1] == ["tracerl"]:
                yield words[1 : words.index("|") if "|" in words else None]


@pytest.mark.parametrize(
    ("page", "job"),
    [
        pytest.param(page, job, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, job in enumerate(jobs(page))
    ],
)
def test_jobs_are_valid(page: Path, job: dict[str, object]) -> None:
    assert check(job) == [], page


def test_the_pages_that_show_a_job_are_found() -> None:
    assert {page.name for page in PAGES if any(jobs(page))} >= {"README.md", "your-own-task.md"}


def test_the_page_of_your_own_task_shows_the_example() -> None:
    page, example = DOCS / "how-to/your-own-task.md", ROOT / "jobs/examples/own-task"
    (job,), (reward,), (line,) = jobs(page), blocks(page, "python"), blocks(page, "json")
    assert job == yaml.safe_load((example / "job.yaml").read_text(encoding="utf-8"))
    assert reward in (example / "reward.py").read_text(encoding="utf-8")
    assert line in (example / "words.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", sorted((DOCS / "how-to").glob("*.md")), ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    for words in commands(page):
        options = _parser().parse_args(words)  # SystemExit says which word is wrong
        if getattr(options, "job", None) is not None:
            assert (ROOT / options.job).exists(), words


def test_the_commands_of_a_page_are_found() -> None:
    found = [words[0] for words in commands(DOCS / "how-to/run-locally.md")]
    assert found == ["doctor", "validate", "run", "run", "run", "compare", "run", "run", "records", "records"]
