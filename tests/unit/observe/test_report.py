"""The report is one page that loads nothing, escapes everything, and stands whatever a run left behind."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_runs import make_start, make_step, write_run

from tracerl.api.errors import InputError
from tracerl.api.resolved import RunLayout
from tracerl.observe.report import render, write_report
from tracerl.observe.run import load_run
from tracerl.observe.runlog import RunLog

VOID = {"meta", "link", "br", "hr", "img", "input"}
HOSTILE = '</title></svg><script>alert("1")</script><img src=x onerror=alert(2)>\'&amp;'


class Page(HTMLParser):
    """Tags in order with their attributes, text, and whether every element is closed where it must be."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def said(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text)).replace("\u00a0", " ")


@pytest.fixture(scope="module")
def trace_page(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Page]:
    directory = write_run(tmp_path_factory.mktemp("runs") / "trace")
    html = render([load_run(directory)])
    return html, Page(html)


def assert_loads_nothing(html: str, page: Page) -> None:
    assert not re.search(r"url\(|@import|https?://", html)
    for tag, attributes in page.tags:
        assert tag not in {"script", "img", "link", "iframe", "object", "embed", "image", "use"}
        assert not [name for name in attributes if name.startswith("on") or name == "src"]
        assert (attributes.get("href") or "#").startswith("#")
        assert attributes.get("http-equiv") in (None, "Content-Security-Policy")


def test_the_page_loads_nothing_and_forbids_it(trace_page: tuple[str, Page]) -> None:
    html, page = trace_page
    assert_loads_nothing(html, page)
    policies = [a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_every_chart_has_a_title_a_description_and_its_numbers_as_a_table(
    trace_page: tuple[str, Page],
) -> None:
    html, page = trace_page
    charts = re.findall(r"<svg [^>]*>(.{0,40})", html)
    assert len(charts) == 12
    assert all(start.startswith("<title>") for start in charts)
    assert html.count("<desc>") == len(charts)
    assert [a["role"] for tag, a in page.tags if tag == "svg"] == ["img"] * len(charts)
    assert html.count("<figure") == len(charts)
    assert html.count("<summary>Table:") == len(charts) - 1  # the overhead's table is always open
    links = {(a["href"] or "")[1:] for tag, a in page.tags if tag == "a"}
    assert links <= {a["id"] for _, a in page.tags if "id" in a}


def test_both_colour_schemes_define_every_colour(trace_page: tuple[str, Page]) -> None:
    html, _ = trace_page
    style = html[html.index("<style>") : html.index("</style>")]
    light, dark = style.split("prefers-color-scheme: dark")[0], style.split("prefers-color-scheme: dark")[1]
    defined = [set(re.findall(r"(--[a-z0-9-]+):", part.split("* {")[0])) for part in (light, dark)]
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", style)) - {"--c"}
    assert used <= defined[0]
    # The dark scheme may keep a colour, but not lack one by accident.
    assert defined[0] == defined[1]
    classes = {match for attribute in re.findall(r'class="([^"]*)"', html) for match in attribute.split()}
    for name in (name for name in classes if name.startswith("s-")):
        assert f".{name}" in style


def test_what_matters_is_on_the_page(trace_page: tuple[str, Page]) -> None:
    said = trace_page[1].said
    for sentence in (
        "0.55 → 0.73",
        "+0.18; end 0.67–0.78 (95 % over 256 prompts)",
        "7.9 % of the unguided 0.063",
        "4 of 327,680 rows missing",
        "Shared memory Spilled Other nodes Object store Held between steps Waits Retries "
        "All steps 15.6 MiB 0 B 2.5 MiB 0 B 2 MiB (6.3 %) 1 1",
        "Extra forward 190 ms (12.9 %)",
        "rollout-0 shows another instance",
        "maxGapRatio at most 0.5 0.079 met",
        "builtin://tiny-moe",
    ):
        assert sentence in said


@pytest.mark.parametrize("method", ["BF16", "Vanilla", "QAT"])
def test_other_methods_have_no_guided_figures(tmp_path: Path, method: str) -> None:
    page = Page(render([load_run(write_run(tmp_path / "run", method, steps=4))]))
    assert "Gap, guided" not in page.said
    assert ("How frames travelled" in page.said) == (method != "BF16")
    assert "Set records.auditEvery" in page.said


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    page = Page(render([load_run(write_run(tmp_path / "run", done=0, end=""))]))
    assert "This run has not ended" in page.said
    assert page.said.count("No step was done") >= 3


def test_a_failed_run_says_why_at_the_top(tmp_path: Path) -> None:
    page = Page(render([load_run(write_run(tmp_path / "run", done=7, end="Failed"))]))
    assert "Failed after step 7 of 40. RecordsMissing: 12 % of the record rows of step 7" in page.said


def test_a_run_with_one_step_and_no_job_document_has_a_page(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", done=1, end="")
    RunLayout(directory).job.unlink()
    page = Page(render([load_run(directory)]))
    assert "run Unfinished" in page.said
    assert "Gap, guided" in page.said


def test_a_run_of_which_only_events_are_left_has_a_page(tmp_path: Path) -> None:
    with RunLog(tmp_path / "run") as log:
        log.event("RolloutFailed", "the rollout did not start")
    assert "the rollout did not start" in Page(render([load_run(tmp_path / "run")])).said


def test_lines_of_another_version_are_counted_and_said(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", done=3)
    with RunLayout(directory).metrics.open("a") as file:
        file.write('{"type":"step","step":4,"later":true}\n{"torn')
    page = Page(render([load_run(directory)]))
    assert "2 lines of the logs could not be read" in page.said


@pytest.mark.parametrize("line", ["[" * 200_000, '{"step":' + "9" * 400 + "}"])
def test_damage_that_json_cannot_hold_is_a_line_that_cannot_be_read(tmp_path: Path, line: str) -> None:
    directory = write_run(tmp_path / "run", done=3)
    with RunLayout(directory).metrics.open("a") as file:
        file.write(f"{line}\n")
    run = load_run(directory)
    assert (len(run.steps), run.unreadable) == (3, 1)


@pytest.mark.parametrize(
    "document", ["[" * 5_000, "made: 2026-99-99", "spec: &all {spec: *all}", "job: &all [*all]"]
)
def test_a_job_document_that_is_damaged_is_refused_with_its_path(tmp_path: Path, document: str) -> None:
    directory = write_run(tmp_path / "run", done=3)
    RunLayout(directory).job.write_text(document)
    with pytest.raises(InputError, match=r"job.yaml cannot be read .*; restore it or give another run"):
        load_run(directory)


def test_a_log_that_is_no_file_is_refused_with_its_path(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", done=3)
    RunLayout(directory).metrics.unlink()
    RunLayout(directory).metrics.mkdir()
    with pytest.raises(InputError, match=r"metrics.jsonl cannot be read \(Is a directory\); restore it"):
        load_run(directory)


@pytest.mark.parametrize("where", ["event", "reason", "directory", "job", "kind"])
def test_hostile_text_is_shown_and_never_run(tmp_path: Path, where: str) -> None:
    name = HOSTILE.replace("/", "∕") if where == "directory" else "run"
    directory = write_run(tmp_path / name, done=2, end="")
    with RunLog(directory) as log:
        if where == "event":
            log.event("RolloutFailed", HOSTILE)
        if where == "reason":
            log.event(HOSTILE, "message")
        if where == "kind":
            site = make_step(3).mismatch[0].model_copy(update={"kind": HOSTILE})
            log.write(make_step(3, mismatch=(site,)).model_dump(mode="json"))
    if where == "directory":
        RunLayout(directory).job.unlink()
    if where == "job":
        layout = RunLayout(directory)
        text = layout.job.read_text().replace("builtin://tiny-moe", "'" + HOSTILE.replace("'", "''") + "'")
        layout.job.write_text(text)
    html = render([load_run(directory)])
    page = Page(html)
    assert_loads_nothing(html, page)
    assert 'alert("1")' in page.said.replace("&quot;", '"')


@settings(max_examples=25, deadline=None)
@given(message=st.text(min_size=1))
def test_any_message_comes_out_as_it_went_in(tmp_path_factory: pytest.TempPathFactory, message: str) -> None:
    directory = tmp_path_factory.mktemp("run")
    with RunLog(directory) as log:
        log.event("Reason", f"[{message}]")
    page = Page(render([load_run(directory)]))
    assert re.sub(r"\s+", " ", f"[{message}]").replace("\u00a0", " ") in page.said


def test_a_message_that_is_not_unicode_is_still_written(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", done=1, end="")
    with RunLog(directory) as log:
        log.event("ModelLoad", "weights-\udcff.safetensors is damaged")
    path = tmp_path / "report.html"
    write_report([load_run(directory)], path)
    assert "weights-?.safetensors is damaged" in Page(path.read_text(encoding="utf-8")).said


def test_secrets_of_the_job_are_not_on_the_page(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", done=1)
    layout = RunLayout(directory)
    document = layout.job.read_text()
    document = document.replace("uri: builtin://tiny-moe", "uri: s3://id:hunter2@host/model?sig=hunter2")
    document = document.replace(
        "engineArgs: {}", "engineArgs: {apiKey: hunter2, flags: '--hf-token=hunter2'}"
    )
    layout.job.write_text(document)
    with RunLog(directory) as log:
        log.event(
            "RolloutFailed", "GET https://u:hunter2@host/x?token=hunter2 with Authorization: Bearer hunter2xx"
        )
    html = render([load_run(directory)])
    assert "(hidden)" in html
    assert "hunter2" not in html


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    runs = [
        load_run(write_run(tmp_path / f"{method}-{seed}", method, seed=seed, steps=10))
        for method in ("BF16", "QAT", "TRACE")
        for seed in (1, 2)
    ]
    html = render(runs)
    page = Page(html)
    assert_loads_nothing(html, page)
    for sentence in (
        "6 runs",
        "BF16 · QAT · TRACE, 1-bit codes, LastHalf",
        "spec.method.name BF16 BF16 QAT QAT TRACE TRACE",
        "spec.algorithm.seed 1 2 1 2 1 2",
        "TRACE, 1-bit codes, LastHalf, guided",
    ):
        assert sentence in page.said


def test_seeds_of_one_variant_stand_side_by_side(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / str(seed), seed=seed, steps=10)) for seed in (1, 2)]
    page = Page(render(runs))
    assert "2 runs" in page.said
    assert "spec.algorithm.seed 1 2" in page.said


def test_settings_that_differ_are_below_the_table_and_not_in_its_heads(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / str(steps), steps=steps)) for steps in (2, 3)]
    page = Page(render(runs))
    assert "TRACE, 1-bit codes, LastHalf, A · TRACE, 1-bit codes, LastHalf, B" in page.said
    assert "A: algorithm.steps 2. B: algorithm.steps 3. ±" in page.said
    assert "Means of 3 steps, of fewer at the start." in page.said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(44.0, "warm-up of 285 steps in 44 s."), (0.0, "warm-up of 285 steps from the cache.")],
)
def test_where_a_warm_up_came_from(tmp_path: Path, seconds: float, said: str) -> None:
    with RunLog(tmp_path) as log:
        log.write(make_start().model_copy(update={"warmup_seconds": seconds}).model_dump(mode="json"))
    assert said in Page(render([load_run(tmp_path)])).said


def test_a_run_that_has_only_started_stands_beside_others(tmp_path: Path) -> None:
    done = load_run(write_run(tmp_path / "a", "QAT", steps=4))
    started = load_run(write_run(tmp_path / "b", done=0, end=""))
    page = Page(render([done, started]))
    assert "Unfinished" in page.said


def test_the_same_run_twice_is_refused(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", done=1))
    with pytest.raises(InputError, match="given twice"):
        render([run, run])
    with pytest.raises(InputError, match="at least one"):
        render([])


def test_a_long_run_has_a_page_of_bounded_size(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", done=0, end="")
    with RunLog(directory) as log:
        log.write(make_start().model_dump(mode="json"))
        for step in range(1, 1001):
            log.write(make_step(step, steps=1000, mismatch=()).model_dump(mode="json"))
    path = tmp_path / "report.html"
    write_report([load_run(directory)], path)
    assert path.stat().st_size < 1_000_000
