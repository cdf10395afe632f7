"""Three turns with the pair that ships with the package; the first message is long, as a document is."""

import pytest

from dflash_mlx import DFlashGenerator
from dflash_mlx.conversation import common_prefix

DOCUMENT = " ".join(
    f"Paragraph {i}: the keeper of the northern light wrote down the wind, the tide and {i * 7 % 31} passing ships."
    for i in range(60)
)


@pytest.mark.slow
def test_turns_read_what_lies_behind_the_longest_shared_beginning_and_say_what_a_cold_run_says() -> None:
    """The number is in the stats, and the text that of a cold run."""
    with DFlashGenerator("smollm2-135m") as runner, DFlashGenerator(runner.target, kept_gb=0) as cold:
        chat = runner.chat(temperature=0.0, max_new_tokens=24)
        held: list[int] = []
        for said in (f"Summarise this: {DOCUMENT}", "Now in five words.", "Who wrote it down?"):
            asked = [*chat._messages(chat.turns), {"role": "user", "content": said}]
            ids = runner._request(asked, {"max_new_tokens": 24}).prompt
            chunks = list(chat.send(said))
            stats, told = chunks[-1].stats, [token for chunk in chunks for token in chunk.tokens]
            assert stats.read_tokens == len(ids) - common_prefix(held, ids)
            assert tuple(told) == cold.generate(ids, temperature=0.0, max_new_tokens=24).token_ids
            held = [*ids, *told[:-1]]
            assert said != chat.turns[0].said or stats.prompt_tokens > 1500
