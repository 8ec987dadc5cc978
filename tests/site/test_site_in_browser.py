"""Site and report as a reader sees them: in a browser, in light and dark, with nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT, Browser
from sample_runs import write_run

from tracerl.observe.report import write_report
from tracerl.observe.run import load_run

KEY_PAGES = (
    "index",
    "start/laptop",
    "concepts/trace",
    "concepts/architecture",
    "how-to/read-the-report",
    "reference/names",
    "troubleshooting",
)
BROKEN_IMAGES = "return [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"
# Tables of which a part can only be seen by moving it; the numbers of charts are folded away and may be wide.
CUT_TABLES = """
return [...document.querySelectorAll('table')].filter(t => !t.closest('details')).filter(t => {
    for (let node = t; node; node = node.parentElement) {
        const moves = getComputedStyle(node).overflowX !== 'visible';
        if (moves && node.scrollWidth > node.clientWidth + 1) return true;
    }
}).map(t => t.textContent.trim().slice(0, 40))"""
# Texts of a picture that lie over each other, or over the edge of a box.
COLLISIONS = """
const found = [];
for (const svg of document.querySelectorAll('svg[role=img]')) {
    const box = e => e.getBoundingClientRect();
    const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
    const inside = (a, b) => a.left >= b.left && a.right <= b.right && a.top >= b.top && a.bottom <= b.bottom;
    const texts = [...svg.querySelectorAll('text')].filter(t => t.textContent.trim());
    for (const [n, one] of texts.entries()) {
        for (const other of texts.slice(n + 1))
            if (meet(box(one), box(other))) found.push(`${one.textContent} / ${other.textContent}`);
        for (const edge of svg.querySelectorAll('rect:not(.line, .bar)')) {
            const [a, b] = [box(one), box(edge)];
            if (meet(a, b) && !inside(a, b)) found.push(`${one.textContent} / box`);
        }
    }
}
return found"""
SHOWN_SCHEME = r"""
const [r, g, b] = getComputedStyle(document.body).backgroundColor.match(/\d+/g).map(Number);
return r + g + b > 384 ? 'light' : 'dark'"""
EMPTY_CHARTS = """
return [...document.querySelectorAll('figure svg')].filter(s => {
    const box = s.getBoundingClientRect();
    return box.width < 100 || box.height < 100 || !s.querySelector('.line, .bar, .dot');
}).map(s => s.querySelector('title').textContent)"""
# Text whose colour is not apart from what is behind it: WCAG's contrast below 3.
FAINT = r"""
const channel = v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4 };
const rgb = text => (text.match(/[\d.]+/g) || []).map(Number);
const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
const behind = node => {
    for (; node; node = node.parentElement) {
        const c = rgb(getComputedStyle(node).backgroundColor);
        if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
};
const found = [];
const every = 'h1, h2, h3, p, li, td, th, dt, dd, a, summary, text';
for (const node of document.querySelectorAll(arguments[0] || every)) {
    if (!node.textContent.trim() || !node.getClientRects().length) continue;
    const style = getComputedStyle(node), svg = node.namespaceURI.endsWith('svg');
    const ink = rgb(svg ? style.fill : style.color);
    if (ink.length < 3 || (ink.length === 4 && ink[3] < 1) || Number(style.opacity) < 1) continue;
    const [a, b] = [light(ink), light(behind(svg ? node.ownerSVGElement.parentElement : node))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const text = node.textContent.trim().slice(0, 40);
    if (contrast < 3) found.push(`${node.tagName} ${text} ${contrast.toFixed(1)}`);
}
return found"""


def pages_of(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*.html"))


def test_no_page_names_anything_to_fetch_from_elsewhere(site: tuple[str, Path]) -> None:
    _, directory = site
    loads = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=["']?(https?:)?//""")
    named = {}
    for page in pages_of(directory):
        text = (directory / page).read_text(encoding="utf-8")
        tags = [
            tag for tag in re.findall(r"<(?:script|img|iframe|link)\b[^>]*>", text) if "canonical" not in tag
        ]
        named[page] = [tag for tag in tags if loads.match(tag)]
    assert len(named) > 40
    assert {page: tags for page, tags in named.items() if tags} == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_of_the_site(browser: Browser, site: tuple[str, Path], scheme: str) -> None:
    address, directory = site
    pages = pages_of(directory) if scheme == "light" else [f"{page}.html" for page in KEY_PAGES]
    wrong: dict[str, list[str]] = {}
    for page in pages:
        complaints = browser.open(f"{address}/{page}", scheme)
        complaints += [f"broken {source}" for source in browser.ask(BROKEN_IMAGES)]
        complaints += [f"fetched {one}" for one in browser.fetched() if not one.startswith(address)]
        if browser.ask("return document.documentElement.scrollWidth > innerWidth"):
            complaints.append("wider than the window")
        complaints += [f"cut table {one}" for one in browser.ask(CUT_TABLES)]
        # What was chosen for the page before must not stay.
        if browser.ask(SHOWN_SCHEME) != scheme:
            complaints.append(f"not {scheme}")
        if page.removesuffix(".html") in KEY_PAGES:
            complaints += [
                f"faint {one}" for one in browser.driver.execute_script(FAINT, "article h1, article p")
            ]
            browser.picture(f"{page.removesuffix('.html').replace('/', '-')}-{scheme}")
        if complaints:
            wrong[page] = complaints
    assert wrong == {}


@pytest.mark.parametrize("picture", sorted((ROOT / "docs/figures").glob("*.svg")), ids=lambda path: path.stem)
def test_words_of_a_picture_can_be_read(browser: Browser, picture: Path) -> None:
    assert browser.open(picture.as_uri()) == []
    assert browser.ask("return document.querySelectorAll('text').length") > 5
    assert browser.ask(COLLISIONS) == []


def test_words_over_each_other_are_found(browser: Browser, tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    picture.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="300" height="90" role="img">'
        '<rect width="20" height="90"/><text x="5" y="80">wide</text>'
        '<text x="90" y="40">one word</text><text x="100" y="44">another</text></svg>'
    )
    browser.open(picture.as_uri())
    assert browser.ask(COLLISIONS) == ["wide / box", "one word / another"]


def test_search_finds_a_reason_by_its_name(browser: Browser, site: tuple[str, Path]) -> None:
    address, _ = site
    browser.open(f"{address}/index.html?q=RestartsExhausted")
    from selenium.webdriver.support.wait import WebDriverWait

    results = "return [...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
    found = WebDriverWait(browser.driver, 60).until(lambda _: browser.ask(results))
    assert any("troubleshooting.html" in address for address in found)


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of one run, of one that failed, of two and of six."""
    here = tmp_path_factory.mktemp("reports")
    one, failed = write_run(here / "one"), write_run(here / "failed", done=7, end="Failed")
    methods = {
        name: [write_run(here / f"{name}-{seed}", name, seed=seed) for seed in (1, 2)]
        for name in ("QAT", "TRACE")
    }
    runs = {"one": [one], "failed": [failed], "two": [methods["QAT"][0], methods["TRACE"][0]]}
    runs["four"] = [run for made in methods.values() for run in made]
    for name, directories in runs.items():
        write_report([load_run(directory) for directory in directories], here / f"{name}.html")
    return {name: here / f"{name}.html" for name in runs}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["one", "failed", "two", "four"])
def test_reports(browser: Browser, reports: dict[str, Path], name: str, scheme: str) -> None:
    assert browser.open(reports[name].as_uri(), scheme) == []
    assert browser.fetched() == []
    assert browser.ask("return document.querySelectorAll('figure svg').length") >= 8
    assert browser.ask(EMPTY_CHARTS) == []
    assert browser.driver.execute_script(FAINT, "") == []
    assert not browser.ask("return document.documentElement.scrollWidth > innerWidth")
    assert browser.ask(CUT_TABLES) == []
    assert browser.ask(COLLISIONS) == []
    browser.picture(f"report-{name}-{scheme}")
    assert browser.open(reports[name].as_uri(), scheme, (480, 900)) == []
    assert not browser.ask("return document.documentElement.scrollWidth > innerWidth")
