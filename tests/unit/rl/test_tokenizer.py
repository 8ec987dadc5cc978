"""Tokenizers: the 64 symbols lose nothing, and a tokenizer.json is read from wherever the model is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracerl.api.errors import InputError, JobError
from tracerl.api.job import ModelSource
from tracerl.rl.tasks import ChainSum
from tracerl.rl.tokenizer import SYMBOLS, CharacterTokenizer, load_tokenizer


def test_chain_sum_fits_the_character_tokenizer() -> None:
    tokenizer = CharacterTokenizer()
    parameters = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
    item = ChainSum(parameters, 17).items([0])[0]
    ids = tokenizer.encode(item.prompt)
    # Question, two digits, sign, two digits, equals sign.
    assert len(ids) == 7
    assert tokenizer.decode(ids) == item.prompt
    assert tokenizer.vocab == 64 == len(set(SYMBOLS))


@given(st.text("abcxyz0189 +-=.:?\n", max_size=40))
def test_the_character_tokenizer_loses_nothing(text: str) -> None:
    tokenizer = CharacterTokenizer()
    assert tokenizer.decode([*tokenizer.encode(text), *tokenizer.stop_ids, 0]) == text


def test_a_character_without_symbol() -> None:
    with pytest.raises(InputError, match="the character 'é' of 'café' is not among the 64 symbols"):
        CharacterTokenizer().encode("café")


def model(directory: Path, **files: object) -> ModelSource:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return ModelSource(uri=directory.as_uri())


def words(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<eos>": 0, "<unk>": 1, "one": 2, "plus": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))


def test_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    words(tmp_path)
    source = model(tmp_path, config={"eos_token_id": 7}, generation_config={"eos_token_id": [0, 5]})
    tokenizer = load_tokenizer(source)
    assert (tokenizer.vocab, tokenizer.stop_ids) == (4, (0, 5))
    assert tokenizer.encode("one plus two") == [2, 3, 1]
    assert tokenizer.decode([2, 3, 2, 0]) == "one plus one"
    # The model's own tokenizer gives way to another one.
    other = tmp_path / "other"
    other.mkdir()
    words(other)
    model(other, config={"eos_token_id": 3})
    assert load_tokenizer(source.model_copy(update={"tokenizer_uri": other.as_uri()})).stop_ids == (3,)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    source = model(tmp_path, config={})
    with pytest.raises(JobError, match=r"has no eos_token_id in generation_config.json or config.json"):
        load_tokenizer(source)
    source = model(tmp_path, config={"eos_token_id": 0})
    with pytest.raises(JobError, match=r"has no tokenizer.json; set model.tokenizerUri"):
        load_tokenizer(source)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(JobError, match=r"tokenizer.json cannot be read \(.*\); save it again"):
        load_tokenizer(source)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(JobError, match=r"config.json is not a JSON object"):
        load_tokenizer(source)
    with pytest.raises(JobError, match=r"nowhere://x/generation_config.json cannot be read"):
        load_tokenizer(ModelSource(uri="nowhere://x"))
