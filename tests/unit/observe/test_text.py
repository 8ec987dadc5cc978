"""Numbers as people read them, and secrets as they must not."""

from __future__ import annotations

import pytest

from tracerl.observe import text
from tracerl.observe.redact import HIDDEN, redact, redact_text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0.0, "0"),
        (0.00244, "0.00244"),
        (0.000012, "0.000012"),
        (0.0000012, "1.2e-06"),
        (0.5, "0.5"),
        (12.345, "12.3"),
        (99.96, "100"),
        (1234.6, "1,235"),
        (-0.25, "-0.25"),
    ],
)
def test_number(value: float | None, shown: str) -> None:
    assert text.number(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0.0, "0 %"),
        (0.0244, "2.4 %"),
        (0.5, "50 %"),
        (0.1234, "12.3 %"),
        (0.0000122, "0.0012 %"),
    ],
)
def test_share(value: float | None, shown: str) -> None:
    assert text.share(value).replace("\u00a0", " ") == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0.0, "0 s"),
        (0.0004, "0.4 ms"),
        (0.045, "45 ms"),
        (0.9996, "1 s"),
        (1.416, "1.42 s"),
        (312.0, "5 min 12 s"),
        (3599.9, "1 h 0 min"),
        (12_000.0, "3 h 20 min"),
    ],
)
def test_seconds(value: float | None, shown: str) -> None:
    assert text.seconds(value).replace("\u00a0", " ") == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "–"), (0, "0 B"), (312, "312 B"), (6080, "5.94 KiB"), (2**40, "1 TiB")]
)
def test_size(value: float | None, shown: str) -> None:
    assert text.size(value).replace("\u00a0", " ") == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (22, "22nd"), (113, "113th")],
)
def test_ordinal(value: int, shown: str) -> None:
    assert text.ordinal(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(None, "–"), (0.0, "1970-01-01 00:00:00 UTC"), (1e300, "–")])
def test_moment(value: float | None, shown: str) -> None:
    assert text.moment(value) == shown


def test_a_single_unit_can_be_parted_from_its_value() -> None:
    assert text.value_and_unit(text.size(6080)) == ("5.94", "KiB")
    assert text.value_and_unit(text.share(0.5)) == ("50", "%")
    assert text.value_and_unit(text.seconds(312.0)) == ("5\u00a0min 12\u00a0s", "")
    assert text.value_and_unit(text.UNKNOWN) == ("–", "")


@pytest.mark.parametrize(
    ("document", "shown"),
    [
        ({"apiKey": "k", "AWS_SECRET_ACCESS_KEY": "k"}, {"apiKey": HIDDEN, "AWS_SECRET_ACCESS_KEY": HIDDEN}),
        ({"password": ["a", "b"]}, {"password": HIDDEN}),
        ({"password": None, "token": ""}, {"password": None, "token": ""}),
        ([{"name": "HF_TOKEN", "value": "k"}], [{"name": "HF_TOKEN", "value": HIDDEN}]),
        (["--api-key", "k", "--port", "80"], ["--api-key", HIDDEN, "--port", "80"]),
        # References to secrets, and words that only resemble them, stay.
        ({"secretName": "s3", "tokenFile": "/run/token"}, {"secretName": "s3", "tokenFile": "/run/token"}),
        ({"maxPromptTokens": 64, "chunkTokens": 512}, {"maxPromptTokens": 64, "chunkTokens": 512}),
        ({"name": "PORT", "value": "80"}, {"name": "PORT", "value": "80"}),
        ({"tokenizerUri": "hf://a/b"}, {"tokenizerUri": "hf://a/b"}),
    ],
)
def test_redact(document: object, shown: object) -> None:
    assert redact(document) == shown


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("s3://id:key@bucket/x", f"s3://{HIDDEN}@bucket/x"),
        ("GET https://h/x?X-Amz-Signature=abc&part=1", f"GET https://h/x?X-Amz-Signature={HIDDEN}&part=1"),
        ("run --hf-token=abc --steps=3", f"run --hf-token={HIDDEN} --steps=3"),
        ("Authorization: Bearer abcdefgh.ijkl", f"Authorization: Bearer {HIDDEN}"),
        ("a trajectory has 12 tokens; mail me@host", "a trajectory has 12 tokens; mail me@host"),
    ],
)
def test_redact_text(said: str, shown: str) -> None:
    assert redact_text(said) == shown
