"""The tasks with a right answer: arithmetic, recall, text to JSON, chat turns. Built in chapter 00.

Every function returns a list of segments `(text, is_answer)`. A prompt is everything up to an answer, so that
what the model is asked at test time is cut at exactly the places at which the training text was tokenized.
"""

from __future__ import annotations

import json
import random

from .stories import filler, short_story
from .words import WORDS, expand, person

Segments = list[tuple[str, bool]]


def arithmetic(rng: random.Random) -> Segments:
    """A word problem of one to three steps, every step worked; the last words are "The answer is N."."""
    who, item = person(rng), rng.choice(WORDS["item"])
    slots = who | {"item": item, "shop": rng.choice(["market", "shop", "fair", "school", "farm"])}
    total, sentences, work = _start(rng, slots)
    for _ in range(rng.choice((1, 1, 2))):
        total, sentence, step = _step(rng, total, slots)
        sentences.append(sentence)
        work.append(step)
    ask = rng.choice(
        (
            "How many {item} does {name} have [now|in the end|left|altogether]?",
            "How many {item} are there [now|in the end]?",
        )
    )
    question = " ".join(expand(s, rng, slots) for s in [*sentences, ask])
    answer = " ".join(f"{w}." for w in work) + f" The answer is {total}."
    return [(f"Question: {question}\nAnswer:", False), (f" {answer}", True)]


def _start(rng: random.Random, slots: dict) -> tuple[int, list[str], list[str]]:
    if rng.random() < 0.5:
        have = rng.randint(2, 60)
        return have, [f"{{name}} [has|owns|starts with] {have} {{item}}."], []
    groups, each = rng.randint(2, 9), rng.randint(2, 9)
    box = rng.choice(WORDS["container"])
    sentence = rng.choice(
        (
            f"{{name}} has {groups} {box} with {each} {{item}} in each.",
            f"{{name}} [buys|finds|fills] {groups} {box} of {each} {{item}}.",
        )
    )
    return groups * each, [sentence], [f"{groups} times {each} is {groups * each}"]


def _step(rng: random.Random, total: int, slots: dict) -> tuple[int, str, str]:
    kind = rng.choice(("add", "add", "take", "take", "times"))
    if kind == "times" and total <= 12:
        k = rng.randint(2, 4)
        return (
            total * k,
            f"Then {{he}} {rng.choice(('doubles', 'gets double'))} them."
            if k == 2
            else f"Soon {{he}} has {k} times as many.",
            f"{k} times {total} is {total * k}",
        )
    if kind == "take" and total >= 4:
        less = rng.randint(1, total - 1)
        sentence = rng.choice(
            (
                f"{{he}} [gives|sells] {less} {{item}} [to a friend|to {{his}} teacher|at the {{shop}}].",
                f"{{he}} [loses|drops|gives away] {less} of them.",
                f"Then {less} {{item}} are [lost|taken away].",
            )
        )
        return total - less, sentence, _worked(total, "-", less)
    more = rng.randint(1, max(1, min(60, 99 - total)))
    sentence = rng.choice(
        (
            f"{{he}} [buys|finds|gets|makes] {more} more {{item}} [at the {{shop}}|].",
            f"A friend [gives|brings|sends] {{him}} {more} {{item}}.",
            f"Then {{he}} gets {more} more.",
        )
    )
    return total + more, sentence, _worked(total, "+", more)


def _worked(a: int, sign: str, b: int) -> str:
    """The sum as it is said aloud: the tens first, then the ones. "46 + 10 = 56. 56 + 7 = 63"."""
    tens, ones = b // 10 * 10, b % 10
    between = a + tens if sign == "+" else a - tens
    result = between + ones if sign == "+" else between - ones
    if not tens or not ones:
        return f"{a} {sign} {b} = {result}"
    return f"{a} {sign} {tens} = {between}. {between} {sign} {ones} = {result}"


FACTS = [
    "The number of {name} is {value}.",
    "Remember: the number of {name} is {value}.",
    "As everyone knows, the number of {name} is {value}.",
    "In the book it says that the number of {name} is {value}.",
]


def recall(
    rng: random.Random, num_facts: int | None = None, num_fillers: int | None = None, num_questions: int = 4
) -> Segments:
    """A telephone book spread over a long text, then questions on some of it: needles in a haystack.

    At most 36 facts: so many names there are.
    """
    n = num_facts or rng.choice((2, 3, 4, 5, 6, 8, 10))
    num_fillers = rng.randint(0, 2 * n) if num_fillers is None else num_fillers
    names = rng.sample(WORDS["girl"] + WORDS["boy"], n)
    values = rng.sample(range(100, 1000), n)
    sentences = [rng.choice(FACTS).format(name=name, value=value) for name, value in zip(names, values)]
    for _ in range(num_fillers):
        sentences.insert(rng.randint(0, len(sentences)), filler(rng))
    segments: Segments = []
    text = " ".join(sentences)
    for i in rng.sample(range(n), min(n, num_questions)):
        segments += [
            (f"{text}\nQuestion: What is the number of {names[i]}?\nAnswer:", False),
            (f" The number of {names[i]} is {values[i]}.", True),
        ]
        text = ""
    return segments


def to_json(rng: random.Random) -> Segments:
    """A few sentences about a person, an order, an animal or an event, and some of its fields as a JSON object."""
    fields, sentences = rng.choice((_person, _order, _pet, _event))(rng)
    rng.shuffle(sentences)
    if rng.random() < 0.3:
        sentences.insert(rng.randint(0, len(sentences)), filler(rng))
    names = rng.sample(sorted(fields), rng.randint(2, len(fields)))
    answer = json.dumps({name: fields[name] for name in names})
    return [(f"Text: {' '.join(sentences)}\nFields: {', '.join(names)}\nJSON:", False), (f" {answer}", True)]


def _person(rng: random.Random) -> tuple[dict, list[str]]:
    who = person(rng)
    f = {
        "name": who["name"],
        "age": rng.randint(18, 90),
        "job": rng.choice(WORDS["job"]),
        "city": rng.choice(WORDS["city"]),
    }
    s = who | {k: str(v) for k, v in f.items()}
    return f, [
        expand(t, rng, s)
        for t in (
            "{name} [works as a {job}|is a {job}|earns a living as a {job}].",
            "{name} [is {age} years old|turned {age} this year].",
            "[{name} lives in {city}|The home of {name} is in {city}|{name} moved to {city} last year].",
        )
    ]


def _order(rng: random.Random) -> tuple[dict, list[str]]:
    f = {
        "customer": person(rng)["name"],
        "item": rng.choice(WORDS["item"]),
        "quantity": rng.randint(2, 99),
        "price": rng.randint(2, 99),
        "day": rng.choice(WORDS["day"]),
    }
    s = {k: str(v) for k, v in f.items()}
    return f, [
        expand(t, rng, s)
        for t in (
            "{customer} [ordered|bought|asked for] {quantity} {item}.",
            "[The price is {price} coins|Together they cost {price} coins|The bill was {price} coins].",
            "[They arrive on {day}|The delivery is on {day}|Please send them on {day}].",
        )
    ]


def _pet(rng: random.Random) -> tuple[dict, list[str]]:
    f = {
        "animal": rng.choice(WORDS["animal"]),
        "name": person(rng)["name"],
        "colour": rng.choice(WORDS["colour"]),
        "age": rng.randint(1, 20),
    }
    s = {k: str(v) for k, v in f.items()}
    return f, [
        expand(t, rng, s)
        for t in (
            "[We have a {animal} called {name}|{name} is a {animal}|Our {animal} is named {name}].",
            "[The fur|The coat|The back] of {name} is {colour}.",
            "{name} is {age} years old.",
        )
    ]


def _event(rng: random.Random) -> tuple[dict, list[str]]:
    f = {
        "event": rng.choice(WORDS["event"]),
        "city": rng.choice(WORDS["city"]),
        "day": rng.choice(WORDS["day"]),
        "guests": rng.randint(10, 99),
    }
    s = {k: str(v) for k, v in f.items()}
    return f, [
        expand(t, rng, s)
        for t in (
            "[There is a {event} in {city}|A {event} will be held in {city}|The {event} takes place in {city}].",
            "[It is on {day}|The date is {day}|Be there on {day}].",
            "[They expect {guests} guests|{guests} guests are invited].",
        )
    ]


SOUNDS = {
    "cow": "moo",
    "cat": "meow",
    "dog": "woof",
    "duck": "quack",
    "sheep": "baa",
    "owl": "hoot",
    "frog": "croak",
    "pig": "oink",
}
OPPOSITES = [("hot", "cold"), ("big", "small"), ("day", "night"), ("fast", "slow"), ("up", "down"), ("open", "closed"),
             ("happy", "sad"), ("early", "late"), ("old", "new"), ("wet", "dry"), ("full", "empty"),
             ("loud", "quiet")]  # fmt: skip


def chat(rng: random.Random) -> Segments:
    """One to four turns; what the user said about themselves is asked about later."""
    who, colour, food = person(rng)["name"], rng.choice(WORDS["colour"]), rng.choice(WORDS["fruit"])
    turns = [_small_talk(rng) for _ in range(rng.randint(0, 2))]
    if rng.random() < 0.6:
        turns.insert(
            0,
            (
                rng.choice((f"Hello, I am {who}.", f"Hi! My name is {who}.", f"Good morning, {who} here.")),
                rng.choice((f"Hello {who}! How can I help you?", f"Nice to meet you, {who}.")),
            ),
        )
        turns.append((rng.choice(("What is my name?", "Do you remember my name?")), f"Your name is {who}."))
    if rng.random() < 0.4:
        turns.insert(
            0,
            (
                f"My favourite colour is {colour} and I like to eat {food}s.".replace("ys.", "ies.").replace(
                    "chs.", "ches."
                ),
                rng.choice(("I will remember that.", "Good to know!")),
            ),
        )
        turns.append(("What is my favourite colour?", f"Your favourite colour is {colour}."))
    segments: Segments = []
    for user, assistant in turns or [_small_talk(rng)]:
        segments += [(f"<|user|>{user}<|assistant|>", False), (f"{assistant}<|end|>", True)]
    return segments


def _small_talk(rng: random.Random) -> tuple[str, str]:
    return rng.choice((_greet, _sound, _opposite, _next_day, _sum, _list, _tell, _tell))(rng)


def _greet(rng):
    return rng.choice(
        (
            ("Hello!", "Hello! How can I help you?"),
            ("How are you?", "I am fine, thank you."),
            ("Thank you!", "You are welcome!"),
            ("Good night!", "Good night! Sleep well."),
        )
    )


def _sound(rng):
    animal = rng.choice(sorted(SOUNDS))
    return f"What does a {animal} say?".replace(" a owl", " an owl"), f"It says {SOUNDS[animal]}."


def _opposite(rng):
    a, b = rng.choice(OPPOSITES)
    a, b = rng.choice(((a, b), (b, a)))
    return f"What is the opposite of {a}?", f"The opposite of {a} is {b}."


def _next_day(rng):
    i = rng.randrange(7)
    return f"What day comes after {WORDS['day'][i]}?", f"After {WORDS['day'][i]} comes {WORDS['day'][(i + 1) % 7]}."


def _sum(rng):
    a, b = rng.randint(1, 50), rng.randint(1, 49)
    return f"What is {a} plus {b}?", f"{a} + {b} = {a + b}."


def _list(rng):
    kind = rng.choice(("colour", "fruit", "city", "job"))
    plural = {"colour": "colours", "fruit": "fruits", "city": "cities", "job": "jobs"}[kind]
    a, b, c = rng.sample(WORDS[kind], 3)
    return f"Name three {plural}.", f"{a}, {b} and {c}.".capitalize() if kind != "city" else f"{a}, {b} and {c}."


def _tell(rng):
    about = rng.choice(WORDS["creature"])
    return expand(f"[Tell me a story about a {about}.|Tell me about a {about}, please.]", rng), short_story(rng, about)
