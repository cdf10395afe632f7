"""Text that fills a context: any number of sentences, no two alike. Knows no tokenizer and no model.

A repeated passage would flatter: a drafter copies what it has just seen.
"""

from collections.abc import Callable, Iterator
from itertools import count

_WHO = (
    "Anna", "the miller", "a surveyor", "old Tomas", "the ferryman", "Ruth and her aunt", "two clerks", "the baker",
    "a botanist", "Mr Okafor", "the night watch", "Ines", "a travelling smith",
)  # fmt: skip
_DID = (
    "carried", "counted", "repaired", "sold", "drew", "lost", "weighed", "painted", "borrowed", "buried", "found",
)  # fmt: skip
_HOW_MANY = ("three", "forty", "a dozen", "sixteen", "a cartload of", "seven", "two hundred")
_WHAT = (
    "brass lanterns", "maps of the coast", "apple trees", "clay pipes", "letters", "copper kettles", "sheep",
    "wool blankets", "window frames", "barrels of tar", "violin strings", "beehives", "tin soldiers", "roof tiles",
    "ledgers", "river stones", "candles",
)  # fmt: skip
_WHERE = (
    "behind the chapel", "near the harbour", "at the foot of the hill", "in the upper village", "beyond the mill",
    "along the canal", "at the crossroads", "in the schoolhouse", "below the quarry", "by the old bridge",
    "on the north road", "in a dry cellar", "outside the toll gate", "under the plane tree", "at the station",
    "across the ford", "in the tithe barn", "beside the well", "on the last terrace",
)  # fmt: skip
_WHY = (
    "because the winter came early", "although nobody had asked", "to settle an old debt", "for the spring fair",
    "and wrote nothing of it down", "while the river was still low", "as the council had ordered",
    "before the road was closed", "so that the children could see it", "without a word to the mayor",
    "after the second flood", "in exchange for salt", "on the advice of a stranger", "until the light failed",
    "since the roof was leaking", "despite the rain", "with the help of a mule", "against the custom of the place",
    "as if nothing had happened", "for the sake of peace", "when the bells had stopped", "at twice the usual price",
    "and was thanked for it later",
)  # fmt: skip


def sentences() -> Iterator[str]:
    """Notes from an invented chronicle, numbered by year and page, without end."""
    for i in count():
        # Lists of coprime lengths, walked at different paces: no sentence comes again for millions.
        yield (
            f"{1650 + (i * 7) % 251}, page {i + 1}: {_WHO[i * 5 % 13]} {_DID[i * 3 % 11]} {_HOW_MANY[i * 2 % 7]} "
            f"{_WHAT[i * 11 % 17]} {_WHERE[i * 8 % 19]}, {_WHY[i * 10 % 23]}."
        )


def filled(question: str, tokens: int, count_tokens: Callable[[str], int]) -> str:
    """The question after as many notes as make the prompt nearly so many tokens long, and never longer.

    Args:
        question: what is asked at the end.
        tokens: length of the whole prompt.
        count_tokens: of a prompt, with everything that a template adds.
    """
    source, kept = sentences(), list[str]()

    def prompt(notes: list[str]) -> str:
        return f"Notes from a chronicle:\n\n{' '.join(notes)}\n\nLeave these notes aside. {question}"

    while count_tokens(prompt(kept)) <= tokens:
        missing = tokens - count_tokens(prompt(kept))
        kept += [next(source) for _ in range(max(missing // 40, 1))]
    while kept and count_tokens(prompt(kept)) > tokens:
        kept.pop()
    return prompt(kept) if kept else question
