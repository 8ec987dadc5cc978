"""The documentation holds together: links, the way to each page, jobs and commands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tracerl.api.constants import ConditionType, Reason
from tracerl.api.job import KIND, Expect
from tracerl.api.load import check
from tracerl.cli import _parser
from tracerl.observe.junit import Outcome, junit_xml
from tracerl.rl.steprecord import Expectation

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
# Pictures are links, too.
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
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
    runs = ["run"] * 3
    assert found == ["doctor", "validate", *runs, "compare", *runs, "records", "records"]


@pytest.mark.parametrize("name", [*ConditionType, *Reason])
def test_every_condition_and_reason_is_explained_under_its_name(name: str) -> None:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    (said,) = re.findall(rf"^### {name}\n\n(.+?)\n\n", text, re.MULTILINE | re.DOTALL)
    assert len(said.split()) > 4
    assert name.lower() in anchors(DOCS / "troubleshooting.md")


def test_nothing_is_explained_that_is_no_reason() -> None:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### (.+)$", text.partition("## By condition")[2], re.MULTILINE)
    assert headings == [*ConditionType, *Reason]


def test_the_reference_leads_to_what_to_do() -> None:
    found = {
        fragment
        for target, fragment in links(DOCS / "reference/names.md")
        if target.stem == "troubleshooting"
    }
    assert found == {name.lower() for name in (*ConditionType, *Reason)}


def test_how_the_command_line_is_written_down() -> None:
    """Each command has its options in the page's list, and a heading."""
    text = (DOCS / "reference/cli.md").read_text(encoding="utf-8")
    usage = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0]
    (commands,) = (action for action in _parser()._actions if action.dest == "==SUPPRESS==")
    for name, parser in commands.choices.items():  # type: ignore[union-attr]
        assert f"## tracerl {name}" in text, name
        lines = re.findall(rf"^tracerl {name}\b.*(?:\n .*)*", usage, re.MULTILINE)
        options = {
            option for action in parser._actions for option in action.option_strings if option[:2] == "--"
        }
        written = set(re.findall(r"--[a-z-]+", " ".join(lines)))
        assert written >= options - {"--help", "--debug"} or name in ("records", "bench"), name


ACTIONS = ROOT / "jobs/examples/github-actions"


def test_the_workflow_is_one_of_github_actions() -> None:
    """By the schema that check-jsonschema brings along; nothing is fetched."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run(
        [*command, str(ACTIONS / "canary.yaml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_workflow_runs_commands_that_exist() -> None:
    steps = yaml.safe_load((ACTIONS / "canary.yaml").read_text())["jobs"]["canary"]["steps"]
    commands = [shlex.split(step["run"]) for step in steps if "run" in step]
    makes = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [words[1] for words in commands if words[0] == "make"] == ["install"]
    assert "install" in makes
    (words,) = (words for words in commands if words[0].endswith("tracerl"))
    options = _parser().parse_args(words[1:])
    assert (ROOT / options.job).exists()
    assert str(options.junit) == "junit.xml"


def test_the_summary_of_a_workflow(tmp_path: Path) -> None:
    lost = Outcome(
        job="canary",
        complete=False,
        reason="ExpectationBroken",
        message="missed",
        expect=Expect.model_validate({"maxGapRatio": "0.5", "maxMissingRows": 0}),
        expectations=(Expectation(name="maxGapRatio", wanted="<= 0.5", value=0.61, met=False),),
    )
    (tmp_path / "junit.xml").write_text(junit_xml(lost))
    command = [sys.executable, str(ACTIONS / "summary.py"), str(tmp_path / "junit.xml")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[2:] == [
        "| job | passed |  |",
        "| maxGapRatio | failed | maxGapRatio 0.61, wanted <= 0.5 |",
        "| maxMissingRows | skipped | not judged: the job ended before its last step |",
    ]
