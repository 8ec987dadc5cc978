"""Take secrets out of a job document before it is shown.

A manifest should hold no secret, but engine arguments, pod templates and URLs can. What is taken out: text
under a key that names a secret, the value of an environment variable with such a name, credentials in a URL,
signed query parameters, and ``--token=…`` in an argument. A reference to a secret (`secretName`) stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"

_SECRET = r"password|passwd|passphrase|secret|token|api[-_]?key|access[-_]?key(?:[-_]?id)?|private[-_]?key|credentials?|authorization"  # noqa: E501, S105
_KEY = re.compile(rf"(?:^|[-_.a-z0-9])(?:{_SECRET})$", re.IGNORECASE)
_URL_USER = re.compile(r"(?<=://)[^/?#\s@]+(?=@)")
_QUERY = re.compile(rf"(?i)([?&][^=&\s#]*(?:{_SECRET}|signature|sig)=)[^&\s#]+")
_ARGUMENT = re.compile(rf"(?i)(--?[\w-]*(?:{_SECRET})[= ])\S+")
_FLAG = re.compile(rf"(?i)--?[\w-]*(?:{_SECRET})$")
_BEARER = re.compile(r"(?i)\b(bearer )[-\w.~+/=]{8,}")


def redact_text(text: str) -> str:
    """`text` without credentials in URLs and arguments."""
    text = _URL_USER.sub(HIDDEN, text)
    text = _QUERY.sub(rf"\g<1>{HIDDEN}", text)
    text = _ARGUMENT.sub(rf"\g<1>{HIDDEN}", text)
    return _BEARER.sub(rf"\g<1>{HIDDEN}", text)


def redact(document: Any) -> Any:
    """A copy of a JSON-like document without secrets."""
    if isinstance(document, str):
        return redact_text(document)
    if isinstance(document, list):
        flags = [False, *(isinstance(item, str) and _FLAG.match(item) is not None for item in document)]
        return [
            HIDDEN if flag and isinstance(item, str) else redact(item)
            for flag, item in zip(flags, document, strict=False)
        ]
    if not isinstance(document, Mapping):
        return document
    named = document.get("name")
    is_secret_variable = isinstance(named, str) and _KEY.search(named) is not None
    shown = {}
    for key, value in document.items():
        secret_key = _KEY.search(str(key)) is not None or (is_secret_variable and key == "value")
        shown[key] = HIDDEN if secret_key and isinstance(value, str | list) and value else redact(value)
    return shown
