"""What MkDocs does beyond its own: files of the repository outside docs/, anchors, and whole directories.

Pages link to each other, and to files of the repository, as on GitHub. What they link to outside docs/
becomes a page (Markdown) or a file of the site, so that every link of the site leads somewhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUTSIDE = "repository"
"""Where on the site the repository's other files are."""
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
_MERMAID = re.compile(r"^```mermaid\n.*?^```", re.DOTALL | re.MULTILINE)


def slug(text: str, separator: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", separator)


def _links(text: str) -> Iterator[str]:
    for part in _CODE.split(text)[::2]:
        yield from (target for _, target, _ in _LINK.findall(part))


def _outside(page: Path, target: str) -> Path | None:
    """The repository's file that a link of a page means, where it is not below docs/."""
    path = target.partition("#")[0]
    if not path or re.match(r"[a-z]+:", target):
        return None
    found = (page.parent / path).resolve()
    return None if found.is_relative_to(DOCS) or not found.is_relative_to(ROOT) else found


def _place(path: Path) -> str:
    """Where a file of the repository is among the site's sources."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    # A directory is shown by its README, and index.md is MkDocs' own name for that.
    return f"{OUTSIDE}/{path.relative_to(ROOT).as_posix()}"


def _source(file: File) -> Path:
    return (
        ROOT / file.src_uri.removeprefix(f"{OUTSIDE}/")
        if file.src_uri.startswith(f"{OUTSIDE}/")
        else (DOCS / file.src_uri)
    )


def on_config(config: Any) -> Any:
    """Make anchors as GitHub does, and list the pages of a directory that the menu names, README first."""
    config.mdx_configs["toc"]["slugify"] = slug
    pages = [_place(path) for path in _reachable() if path.suffix == ".md"]
    config.nav = [*map(_listed, config.nav), {"Repository": pages}]
    return config


def _listed(entry: Any) -> Any:
    ((name, target),) = entry.items()
    if not isinstance(target, str) or not target.endswith("/"):
        return entry
    found = [path for path in (DOCS / target).glob("*.md") if path.stem != "template"]
    pages = sorted(found, key=lambda path: (path.stem != "README", path.name))
    return {name: [page.relative_to(DOCS).as_posix() for page in pages]}


def _reachable() -> list[Path]:
    """Files outside docs/ that pages link to, and those that these link to."""
    waiting = sorted(DOCS.rglob("*.md"))
    found: dict[Path, None] = {}
    while waiting:
        page = waiting.pop()
        for target in _links(page.read_text(encoding="utf-8")):
            path = _outside(page, target)
            if path is None or path in found or not path.is_file():
                continue
            found[path] = None
            if path.suffix == ".md":
                waiting.append(path)
    return sorted(found)


def on_files(files: Files, config: Any) -> Files:
    """Add what pages link to outside docs/."""
    for path in _reachable():
        file = File(_place(path), str(ROOT), config.site_dir, config.use_directory_urls)
        file.abs_src_path = str(path)
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links into those of the site; draw the README's picture."""
    source = _source(page.file)
    here = Path(page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        target = match[2]
        path, mark, fragment = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        found = (source.parent / path).resolve()
        if found.is_dir() or not found.exists():
            return match[0]
        place = os.path.relpath(_place(found), here)
        return f"{match[1]}{quote(place)}{mark}{fragment}{match[3]}"

    figure = os.path.relpath("figures/how-it-works.svg", here)
    markdown = _MERMAID.sub(f"![Rollout and trainer, and what travels between them]({figure})", markdown)
    parts = _CODE.split(markdown)
    parts[::2] = [_LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)
