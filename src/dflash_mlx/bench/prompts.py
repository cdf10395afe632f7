"""What is asked in a benchmark: classes of built-in questions. Pure text; knows no model."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dflash_mlx.errors import UsageError


class Question(NamedTuple):
    """One thing to ask, and the class whose figures it counts for."""

    kind: str
    text: str


CLASSES: Mapping[str, tuple[str, ...]] = {
    "code": (
        "Write a Python function that merges two sorted lists into one sorted list, with a docstring and two examples.",
        "Write a Python class for a stack with push, pop, peek and a length; popping an empty stack raises an error.",
        "Write a JavaScript function that groups an array of objects by the value of a key, and show how it is called.",
        "This Python line is slow: [w for w in words if w in long_list]. Say why and write a faster version.",
    ),
    "maths": (
        "A train leaves at 9:40 and covers 210 km at 84 km per hour. When does it arrive? Show each step.",
        "A shop sells pens at 3 for 4.50. What do 14 pens cost, and how much change is left from 25? Show each step.",
        "Solve 3(x - 4) + 2 = 5x - 18 for x and check the solution by putting it in.",
        "A rectangle is 7 cm longer than it is wide and its perimeter is 54 cm. Find its area step by step.",
    ),
    "prose": (
        "Tell the story of a lighthouse keeper who finds a letter in a bottle, in four paragraphs.",
        "Explain to a curious child why the sky is blue at noon and red in the evening.",
        "Describe a market in a small town on a rainy morning so that a reader can smell and hear it.",
        "Write a short essay on why people keep diaries.",
    ),
    "chat": (
        "I sleep badly before exams. What could I change in the evening before?",
        "My neighbour plays loud music at night. How do I bring it up without a quarrel?",
        "I have two days in a city that I do not know and no plan. How should I spend them?",
        "Which houseplants forgive somebody who forgets to water them, and what do they need?",
    ),
    "structured": (
        "Give a JSON array of five European capitals, each with name, country, population and river.",
        "Write a Markdown table of the planets with diameter, distance from the sun and number of moons.",
        "Write a YAML file for a web service with a name, two ports, three environment variables and a health check.",
        "List the months of the year as CSV with the columns number, name, days and season.",
    ),
    "language": (
        "Erkläre in einfachen Worten, wie ein Regenbogen entsteht.",
        "Raconte en quelques phrases l'histoire d'un chat qui voulait voir la mer.",
        "Escribe una receta sencilla de sopa de verduras con los ingredientes y los pasos.",
        "请用简单的话说明为什么天空是蓝色的。",
    ),
}
"""Built-in questions by class; "language" is another one than English."""

MOST = max(map(len, CLASSES.values()))
"""Questions in a class."""


def questions(kinds: Sequence[str], each: int) -> list[Question]:
    """The first questions of these classes, `each` of every class at most."""
    return [Question(kind, text) for kind in kinds for text in CLASSES[kind][:each]]


def check_classes(kinds: Iterable[str]) -> None:
    """Refuse a class that there is none of.

    Raises:
        UsageError: naming it and those that there are.
    """
    for kind in kinds:
        if kind not in CLASSES:
            raise UsageError(f"{kind!r} is no class of prompts; they are {', '.join(CLASSES)}.")
