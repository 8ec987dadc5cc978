"""Nearest names: what someone meant who wrote a name that does not exist."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_ALSO_CALLED = {"list": "indices", "replicas": "nodes"}
"""Names that people bring from elsewhere, by what they are called here."""


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Give the name nearest to `word`, None where none is near; case, dashes and underscores do not count."""

    def plain(text: str) -> str:
        return text.replace("_", "").replace("-", "").lower()

    by_plain = {plain(name): name for name in names}
    # difflib is quadratic in the length, and no name is this long.
    meant = plain(word[:64])
    if meant not in by_plain and _ALSO_CALLED.get(meant) in by_plain:
        meant = _ALSO_CALLED[meant]
    found = get_close_matches(meant, by_plain, n=1, cutoff=0.7)
    return by_plain[found[0]] if found else None
