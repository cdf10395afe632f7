"""An option is honoured or refused before any model work."""

import pytest

from dflash_mlx.core import SamplingParams
from dflash_mlx.errors import UsageError
from dflash_mlx.request import Options, as_messages, fresh_seed

NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_new_tokens", 0, "a whole number from 1 up"),
        ("max_new_tokens", 2.5, "a whole number from 1 up"),
        ("max_new_tokens", True, "a whole number from 1 up"),
        ("top_k", -1, "a whole number from 0 up"),
        ("top_k", 3.0, "a whole number from 0 up"),
        ("seed", -1, "a whole number from 0 up"),
        ("seed", "7", "a whole number from 0 up"),
        ("temperature", "hot", "a number"),
        ("temperature", True, "a number"),
        ("temperature", None, "a number"),
        ("temperature", -1, "0 or more"),
        ("top_p", NAN, "above 0"),
        ("min_p", 2, "between 0 and 1"),
        ("presence_penalty", NAN, "a finite number"),
        ("frequency_penalty", float("inf"), "a finite number"),
        ("repetition_penalty", 0, "above 0"),
        ("raw", "no", "True or False"),
        ("profile", 1, "True or False"),
        ("think", "on", "True, False or None"),
        ("system", 5, "text"),
        ("logits_processors", [3], "a list of functions"),
        ("logits_processors", print, "a list of functions"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused_with_name_and_value(
    name: str, value: object, expected: str
) -> None:
    with pytest.raises(UsageError) as refusal:
        Options.checked({name: value})
    assert str(refusal.value).startswith(f"{name} is {value}") or f"{name} is {value!r}" in str(refusal.value)
    assert expected in str(refusal.value)


def test_an_unknown_option_is_a_type_error_that_lists_the_known_ones() -> None:
    with pytest.raises(
        TypeError, match="unknown option 'temprature'; the options are max_new_tokens, temperature"
    ):
        Options.checked({"temprature": 1})


def test_every_sampling_option_reaches_the_draws() -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
    }
    assert Options.checked(given).sampling(9) == SamplingParams(**given, seed=9)
    assert {*given, "seed"} == set(SamplingParams.__slots__), "no option is forgotten here"


def test_seeds_that_nobody_chose_differ() -> None:
    assert len({fresh_seed() for _ in range(20)}) == 20


def test_text_and_messages_become_messages_and_ids_stay_ids() -> None:
    assert as_messages("hello", None) == [{"role": "user", "content": "hello"}]
    assert as_messages("hello", "be brief") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
    ]
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert as_messages(talk, None) == talk
    assert as_messages([3, 4], None) is None


@pytest.mark.parametrize(
    "prompt", ["", "  \n", [], ["text"], [True, False], [{"role": "user"}, 3], 7, b"text", None]
)
def test_what_is_no_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(UsageError, match="^The prompt is "):
        as_messages(prompt, None)  # type: ignore[arg-type]


def test_two_system_texts_are_refused() -> None:
    with pytest.raises(UsageError, match="a system message and a `system` option"):
        as_messages([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "c")
