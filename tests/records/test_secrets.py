"""Secrets stay out of what is written, by key and by value."""

from __future__ import annotations

from typing import Any

import pytest

from fastloop.records.plan import Change, Plan, Step, Verdict
from fastloop.records.secrets import MASK, Scrubber, is_secret, make_scrubber, mask_secrets


@pytest.mark.parametrize(
    ("key", "secret"),
    [
        ("token", True),
        ("HF_TOKEN", True),
        ("recipe.api_key", True),
        ("--api-key", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("recipe.Password", True),
        ("monkey", True),  # the rule is a plain substring: rather one word too many than one too few
        ("keys.count", False),
        ("secret.size", False),
        ("rungs.workers.count", False),
        ("", False),
        (7, False),
    ],
)
def test_only_the_last_component_of_a_key_counts(key: object, secret: bool) -> None:
    assert is_secret(key) is secret


@pytest.mark.parametrize(
    ("nested", "masked"),
    [
        ({"api_key": "abc", "size": 3}, {"api_key": MASK, "size": 3}),
        ({"a": {"b": [{"token": "abc"}]}}, {"a": {"b": [{"token": MASK}]}}),
        ({"recipe.api_key": "abc"}, {"recipe.api_key": MASK}),
        ({"HF_TOKEN": "abc", "HOME": "/home"}, {"HF_TOKEN": MASK, "HOME": "/home"}),
        ({"password": 12345678}, {"password": MASK}),
        ({"tokens": ["abc", "def"]}, {"tokens": MASK}),
        ({"secrets": {"db": "shown", "db_key": "hidden"}}, {"secrets": {"db": "shown", "db_key": MASK}}),
        ({"api_key": None, "use_token": True}, {"api_key": None, "use_token": True}),
        (["trainer.api_key=abc", "run.seed=1"], ["trainer.api_key=***", "run.seed=1"]),
        (["run.seed=1,recipe.token=a,b=c"], ["run.seed=1,recipe.token=***"]),
        (["recipe.login={user: me, password: abc}"], ["recipe.login={user: me, password: ***"]),
        (['{"token": "abc"}'], ['{"token": ***']),
        (["https://host/?key=abc"], ["https://host/?key=***"]),
        (["--password", "abc", "--steps", "5"], ["--password", MASK, "--steps", "5"]),
        (["--password=abc", "x"], ["--password=***", "x"]),
        (["--no-token", "--steps", "5"], ["--no-token", "--steps", "5"]),
        (("--token", "abc"), ["--token", MASK]),
        (["--steps", 5, ["--token", "abc"]], ["--steps", 5, ["--token", MASK]]),
        ("plain text", "plain text"),
    ],
)
def test_mask(nested: Any, masked: Any) -> None:
    assert mask_secrets(nested) == masked


def test_mask_leaves_the_original_alone() -> None:
    environment = {"HF_TOKEN": "abc", "list": ["--token", "abc"]}
    mask_secrets(environment)
    assert environment == {"HF_TOKEN": "abc", "list": ["--token", "abc"]}


def test_scrubber_finds_known_values_in_other_text() -> None:
    scrubber = Scrubber({"recipe": {"api_key": "hunter2", "url": "https://hunter2@host"}}, ["--token", "hunter2-long"])
    assert scrubber.scrub({"api_key": "hunter2", "url": ["https://hunter2@host"]}) == {
        "api_key": MASK,
        "url": ["https://***@host"],
    }
    assert scrubber.text("hunter2-long and hunter2") == "*** and ***"


def test_scrubber_reads_numbers_and_lists() -> None:
    scrubber = Scrubber({"password": 12345678, "tokens": ["first", "second"]})
    assert scrubber.text("12345678 first second third") == "*** *** *** third"


def test_scrubber_does_not_hunt_for_short_values() -> None:
    scrubber = Scrubber({"token": "abc", "api_key": None, "use_key": False})
    assert scrubber.text("abc None False") == "abc None False"
    assert scrubber.scrub({"token": "abc"}) == {"token": MASK}


def test_scrubber_takes_the_words_of_settings_for_no_secrets() -> None:
    scrubber = Scrubber(["recipe.use_token=true", "--key", "auto"], {"TOKENIZERS": "None", "monkey": "default"})
    assert scrubber.text("write true, auto, None or default") == "write true, auto, None or default"


@pytest.mark.parametrize(
    "argument",
    ["recipe.api_token=hunter2,run.seed=1", '{"token": "hunter2", "seed": 1}', "{token: hunter2}", "--token='hunter2'"],
)
def test_scrubber_finds_a_value_that_more_follows(argument: str) -> None:
    assert Scrubber([argument]).text("note=hunter2") == "note=***"


def test_records_lose_values_and_keep_their_keys_and_numbers() -> None:
    verdicts = (Verdict(rung="amp", took=False, why="no luck with hunter2"),)
    plan = Plan(steps=(Step(rung="amp", status="planned", change=Change(wants={"tokens": "hunter2", "key": 5})),))
    scrubber = Scrubber({"password": "hunter2", "pin": 5, "key": 12345})
    assert scrubber.clean(verdicts) == (Verdict(rung="amp", took=False, why="no luck with ***"),)
    assert scrubber.clean(plan).wants == {"tokens": "***", "key": 5}
    assert scrubber.clean({"tokens_per_s": 12345.0, "steps": [12345]}) == {"tokens_per_s": 12345.0, "steps": [12345]}
    assert verdicts[0].why == "no luck with hunter2" and plan.wants["tokens"] == "hunter2", "the originals stay"


def test_the_secrets_of_this_process_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--api-key", "hunter2", "--note", "hunter2"])
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("TOKENIZERS_LEVEL", "loud")
    scrubber = make_scrubber({"recipe": {"password": "swordfish"}})
    assert scrubber.text("hunter2, hf_abcdefgh, swordfish: loud") == "***, ***, ***: loud"
    assert scrubber.scrub(["train.py", "--api-key", "hunter2", "--note", "hunter2"])[-2:] == ["--note", MASK]
