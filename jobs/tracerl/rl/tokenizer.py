"""Text to token ids and back: 64 fixed symbols for builtin models, tokenizer.json for the others."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

import fsspec

from tracerl.api.constants import Reason
from tracerl.api.errors import InputError, JobError
from tracerl.api.job import ModelSource

CHAIN_SUM_QUESTION = "State the final answer to the following arithmetic problem: "
"""Opening of every chain_sum question. One symbol: a model of half a million parameters would otherwise spend
five sixths of its prompt on a sentence that never changes."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
SYMBOLS: tuple[str, ...] = (
    "<pad>",
    "<eos>",
    CHAIN_SUM_QUESTION,
    " + ",
    " - ",
    " =",
    "\n",
    " ",
    *"0123456789",
    *"+-*/=.,:;?!()<>%'\"[]",
    *_LETTERS,
)
"""Token ids of builtin models by position. Part of what a warm-up's cache key covers."""

_PAD, _EOS = 0, 1
_PATTERN = re.compile("|".join(re.escape(text) for text in sorted(SYMBOLS[2:], key=len, reverse=True)))
_IDS = {text: index for index, text in enumerate(SYMBOLS)}


class Tokenizer(Protocol):
    """What the loop needs of a tokenizer."""

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end a response; the first is appended to supervised answers."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; InputError when it cannot be written with this table."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without pad and stop tokens."""
        ...


class CharacterTokenizer:
    """The 64 symbols of builtin models: the longest wins, so encoding has one answer and loses nothing."""

    vocab = len(SYMBOLS)
    stop_ids = (_EOS,)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; InputError names the first character that the table lacks."""
        ids, position = [], 0
        while position < len(text):
            match = _PATTERN.match(text, position)
            if match is None:
                raise InputError(
                    f"the character {text[position]!r} of {text[:80]!r} is not among the 64 symbols of "
                    "builtin models; use a Hugging Face model with its tokenizer, or a task written in "
                    "lower-case letters, digits and arithmetic signs"
                )
            ids.append(_IDS[match[0]])
            position = match.end()
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without pad and end-of-sequence."""
        return "".join(SYMBOLS[i] for i in ids if i not in (_PAD, _EOS))


class HuggingFaceTokenizer:
    """A tokenizer.json, read with the package `tokenizers`."""

    def __init__(self, tokenizer_json: str, stop_ids: Sequence[int], where: str) -> None:
        try:
            import tokenizers  # noqa: PLC0415 -- optional: builtin models need none
        except ImportError:
            raise JobError(
                Reason.CONFIGURATION,
                f"reading the tokenizer of {where} needs the package tokenizers; "
                "install it with: pip install tokenizers",
            ) from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # noqa: BLE001 -- the package raises bare Exception for a malformed file
            raise JobError(
                Reason.MODEL_LOAD, f"{where}/tokenizer.json cannot be read ({error}); save it again"
            ) from None
        self.vocab: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.stop_ids = tuple(stop_ids)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text with the special tokens that tokenizer.json adds."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        return str(self._tokenizer.decode([i for i in ids if i not in self.stop_ids]))


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """Return the tokenizer of a model; JobError says what is missing where."""
    uri = (source.tokenizer_uri or source.uri).rstrip("/")
    if uri.startswith("builtin://"):
        return CharacterTokenizer()
    stop: object = None
    for name in ("generation_config.json", "config.json"):
        text = _read(f"{uri}/{name}")
        if text is not None and stop is None:
            try:
                stop = json.loads(text).get("eos_token_id")
            except (ValueError, AttributeError):
                raise JobError(
                    Reason.MODEL_LOAD, f"{uri}/{name} is not a JSON object; save the tokenizer again"
                ) from None
    stop_ids = [i for i in (stop if isinstance(stop, list) else [stop]) if isinstance(i, int)]
    if not stop_ids:
        raise JobError(
            Reason.MODEL_LOAD,
            f"{uri} has no eos_token_id in generation_config.json or config.json; add one, "
            "or no response could end",
        )
    tokenizer_json = _read(f"{uri}/tokenizer.json")
    if tokenizer_json is None:
        raise JobError(
            Reason.MODEL_LOAD, f"{uri} has no tokenizer.json; set model.tokenizerUri to a directory with one"
        )
    return HuggingFaceTokenizer(tokenizer_json, stop_ids, uri)


def _read(uri: str) -> str | None:
    try:
        with fsspec.open(uri, "rt", encoding="utf-8") as file:
            return str(file.read())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ImportError, ValueError) as error:
        raise JobError(
            Reason.MODEL_LOAD, f"{uri} cannot be read ({error}); check the address and the credentials"
        ) from None
