"""Prompts made up from templates, in six classes: a random generator in, a question out. Pure text; knows no model.

They stand in where nobody has prompts of their own. A drafter learns the target's way of answering, so what counts is
that the answers vary; the questions need not be clever.
"""

from collections.abc import Callable, Sequence
from random import Random

from dflash_mlx.training.topics import (
    FIELDS,
    FOREIGN,
    FORMATS,
    JOBS,
    LANGUAGES,
    MOODS,
    PEOPLE,
    PLACES,
    PROBLEMS,
    RECORDS,
    STRUCTURES,
    THINGS,
    TOPICS,
    WORKS,
)


def made_up(random: Random) -> tuple[str, str]:
    """A question and its class."""
    kind = random.choices(list(_MAKERS), weights=[weight for weight, _ in _MAKERS.values()])[0]
    text = _MAKERS[kind][1](random)
    return text[0].upper() + text[1:], kind


def _filled(random: Random, forms: Sequence[str], **words: Sequence[str]) -> str:
    form = random.choice(forms)
    return form.format(**{name: random.choice(choices) for name, choices in words.items()})


def _code(random: Random) -> str:
    return _filled(
        random,
        (
            "Write a {language} function that {job}.",
            "Write a {language} function that {job}, and explain how it works.",
            "How do I write {language} code that {job}? Add comments.",
            "Write a {language} program that {job} and prints the result.",
            "Show two ways to write {language} code that {job}, and say which is faster.",
            "Write unit tests for a {language} function that {job}.",
            "Implement {structure} in {language}.",
            "Implement {structure} in {language} and show how it is used.",
            "When would you use {structure}? Give a short {language} example.",
            "My {language} code that {job} is slow for long inputs. What could be wrong? Show a better version.",
            "Explain to a beginner how {language} code that {job} works, line by line.",
            "Write a command-line tool in {language} that {job}.",
        ),
        language=LANGUAGES,
        job=JOBS,
        structure=STRUCTURES,
    )


def _maths(random: Random) -> str:
    a, b, c = random.randint(3, 98), random.randint(2, 60), random.randint(2, 12)
    person, thing = random.choice(PEOPLE), random.choice(THINGS)
    more, less = max(a, b) + 1, min(a, b)
    return random.choice(
        (
            f"What is {a} + {b}?",
            f"What is {a} times {c}? Show your steps.",
            f"Compute {more} - {less} and explain how you did it.",
            f"What is {a * c} divided by {c}?",
            f"One of the {thing} costs ${c}. How much do {b} of them cost?",
            f"{person} has {more} {thing} and gives away {less}. How many are left?",
            f"{person} packs {a} {thing} into each of {c} boxes and adds {b} more. How many are there in all?",
            f"A car drives {a * c} km in {c} hours. What is its average speed?",
            f"A train covers {a} km every hour. How far does it get in {c} hours and 30 minutes?",
            f"Solve for x: {c}x + {b} = {c * a + b}.",
            f"Solve {c}(x - {b}) = {c * a} for x and check the result.",
            f"What is {c * 5}% of {b * 10}?",
            f"A price of ${b * 10} falls by {c * 5}%. What is the new price?",
            f"Find the area and the perimeter of a rectangle that is {a} cm long and {c} cm wide.",
            f"What is the average of {a}, {b} and {c}?",
            f"{person} saves ${b} every week. How long until there are ${b * c}?",
            f"Is {a * 2 + 1} a prime number? Explain.",
            f"What are the factors of {c * less}?",
            f"If {c} {thing} weigh {c * b} grams together, how much do {a} of them weigh?",
            f"What is the probability of drawing one of {less} red balls out of a bag with {more} balls?",
            f"Write {a}/{a + b} as a decimal number with two places.",
            f"Continue the series {c}, {c + less}, {c + 2 * less}, {c + 3 * less} and explain the rule.",
        )
    )


def _prose(random: Random) -> str:
    return _filled(
        random,
        (
            "Explain {topic} in simple terms.",
            "What is {topic}?",
            "Write a short paragraph about {topic}.",
            "Write a short story about {person} and {topic}.",
            "Write a {mood} poem about {topic}.",
            "Describe {place} in the early morning.",
            "Write a short story that takes place in {place}.",
            "Summarise the history of {topic}.",
            "Why does {topic} matter?",
            "How does {topic} affect our lives?",
            "Explain {topic} to a ten-year-old.",
            "What do people often get wrong about {topic}?",
            "Compare {topic} with {other}.",
            "Write an essay of three paragraphs on {topic}.",
            "What is the link between {topic} and {other}?",
            "Tell me something surprising about {topic}.",
            "Write the opening of a {mood} novel about {person}.",
            "How has {topic} changed in the last hundred years?",
            "Write a {mood} letter from {person} to a friend about {topic}.",
            "Name the most important ideas in {field} and explain one of them.",
        ),
        topic=TOPICS,
        other=TOPICS,
        person=PEOPLE,
        place=PLACES,
        mood=MOODS,
        field=FIELDS,
    )


def _chat(random: Random) -> str:
    return _filled(
        random,
        (
            "{problem} What should I do?",
            "{problem} Give me some advice.",
            "{problem} Can you help?",
            "Hi! {problem}",
            "Can you recommend something about {topic}?",
            "I want to learn about {topic}. Where do I start?",
            "Give me five tips on {work}.",
            "Make a plan for a week of {work}.",
            "I am new to {work}. What do I need?",
            "What are the pros and cons of {work}?",
            "Write an email to {person} about {topic}.",
            "Write a {mood} message to {person} who has just started with {work}.",
            "Plan a day in {place} for me.",
            "What would you ask an expert on {topic}?",
            "Rewrite this more politely: I have no time for {work}, ask {person}.",
            "Let us play a guessing game about {topic}.",
            "Thank you! And what about {topic}?",
            "What is your opinion on {topic}?",
        ),
        problem=PROBLEMS,
        topic=TOPICS,
        work=WORKS,
        person=PEOPLE,
        place=PLACES,
        mood=MOODS,
    )


def _structured(random: Random) -> str:
    count = random.randint(2, 8)
    return _filled(
        random,
        (
            f"Give me {{form}} that describes {count} {{record}}.",
            "Give me {form} that describes one of the {record}.",
            "List five facts about {topic} as {form}.",
            f"Make {{form}} of {count} {{record}} with at least three fields each.",
            "Make a numbered list of the steps of {work}.",
            f"Make a table in Markdown with {count} {{record}} and four columns.",
            "Write {form} for the settings of an app about {topic}.",
            "Write a checklist for {work}.",
            "Make an outline with headings and bullet points for a talk on {topic}.",
            "Turn this into {form}: {person} likes {topic} and lives near {place}.",
            "List the advantages and disadvantages of {work} as bullet points.",
            "Write an SQL table for {record} and three queries on it.",
        ),
        form=FORMATS,
        record=RECORDS,
        topic=TOPICS,
        work=WORKS,
        person=PEOPLE,
        place=PLACES,
    )


def _language(random: Random) -> str:
    forms, topics = random.choice(FOREIGN)
    return _filled(random, forms, topic=topics)


_MAKERS: dict[str, tuple[int, Callable[[Random], str]]] = {
    "code": (25, _code),
    "maths": (15, _maths),
    "prose": (22, _prose),
    "chat": (18, _chat),
    "structured": (13, _structured),
    "language": (7, _language),
}

CLASSES = tuple(_MAKERS)
"""Classes of made-up prompts; "language" is another one than English."""
