"""The storyteller: small plots, told beat by beat from many turns of phrase. Built in chapter 00.

A plot is a list of beats; each beat is a list of ways to tell it. One way is drawn for each beat, so a plot of
five beats with four ways each, and several alternatives in every way, is told in many thousands of ways.
"""

from __future__ import annotations

import random

from .plots import PLOTS
from .words import WORDS, expand, person

OPENINGS = [
    "Once upon a time there was a <size> {kind_of} named {name}.",
    "Once upon a time, in a [quiet|green|faraway] <place>, there lived a <kind> {kind_of} named {name}.",
    (
        "Once upon a time a <kind> {kind_of} lived [near a river|beside the sea|at the foot of a hill|in a crooked "
        "house]. {his} name was {name}."
    ),
    (
        "[Long ago|Many years ago|One <weather> autumn|Not so long ago] there was a {kind_of} called {name}, "
        "who was very <kind>."
    ),
    (
        "{name} was a <kind> {kind_of} who lived [in a <place>|with {his} grandmother|near the harbour|in a house "
        "with a <colour> door]."
    ),
    (
        "One <weather> [morning|afternoon|evening|day], a {kind_of} named {name} [went for a walk|looked out of "
        "the window|sat on the steps|woke up early]."
    ),
    "In a [<place>|house|cottage] [by the sea|far away|between two hills] lived {name}, a <kind> {kind_of}.",
    "Everyone in the <place> knew {name}, the <kind> {kind_of}.",
]

HABITS = [
    "",
    (
        "{he} [loved|liked] to [sing in the morning|draw pictures|count the stars|collect shells|tell jokes|bake "
        "bread|climb trees|watch the birds|read by the fire]."
    ),
    "{his} favourite [thing|treasure] was a <colour> <thing>.",
    (
        "Every [morning|evening|Sunday] {he} [walked to the river|fed the ducks|swept the floor|ate a "
        "<food>|helped at the market]."
    ),
    (
        "{he} had a friend named {friend}, and the two of them [did everything together|shared every secret|met "
        "every day <spot>]."
    ),
    (
        "{he} [was never in a hurry|asked a hundred questions a day|laughed easily|did not talk much, "
        "but {he} listened well]."
    ),
]

ENDINGS = [
    (
        "From that day on, {name} [never forgot what {he} had learned|was a little braver|always kept a place for "
        "a friend|slept well every night]."
    ),
    "{name} smiled all the way home.",
    "That night {name} [slept soundly|dreamed of the sea|told the whole story to {friend}|fell asleep with a smile].",
    "And {name} was <glad>, [because {he} was not alone|and so was {friend}|and the whole <place> was <glad> too].",
    (
        "{name} learned that [it is good to ask for help|a true friend is worth more than gold|small steps can go "
        "a long way|being kind costs nothing|telling the truth makes the heart light|it is fine to be "
        "afraid and go on]."
    ),
    "They [laughed|sang|danced] until the [moon came up|stars came out|fire was low].",
    (
        "And if you go to the <place> today, you may still [hear them laughing|see the <colour> <thing> in the "
        "window|meet {name} on the road]."
    ),
    "The end.",
]


def story(rng: random.Random, about: str | None = None) -> str:
    """One story of 60 to 200 words; `about` makes an animal of that kind the hero."""
    slots = _cast(rng, about)
    plot = PLOTS[rng.choice(sorted(PLOTS))]
    beats = [rng.choice(OPENINGS), rng.choice(HABITS)] + [rng.choice(beat) for beat in plot] + [rng.choice(ENDINGS)]
    sentences = [expand(beat, rng, slots) for beat in beats if beat]
    breaks = {2, 4, 6} if rng.random() < 0.5 else set()
    text = "".join(("\n\n" if i in breaks else " " if i else "") + s for i, s in enumerate(sentences))
    return _met_before(text, slots["helper"])


def short_story(rng: random.Random, about: str | None = None) -> str:
    """Three or four sentences, for a chat turn."""
    slots = _cast(rng, about)
    plot = PLOTS[rng.choice(sorted(PLOTS))]
    beats = [rng.choice(OPENINGS), rng.choice(plot[0]), rng.choice(plot[-2]), rng.choice(ENDINGS)]
    return _met_before(" ".join(expand(beat, rng, slots) for beat in beats), slots["helper"])


def filler(rng: random.Random) -> str:
    """One sentence of a story, to stand between the facts of a long text."""
    slots = _cast(rng, None)
    beat = rng.choice(rng.choice([HABITS[1:], ENDINGS[:3], PLOTS[rng.choice(sorted(PLOTS))][2]]))
    return expand(beat, rng, slots)


def _met_before(text: str, helper: str) -> str:
    """A figure that has been "an old fisherman" once is "the old fisherman" from then on."""
    article, _, noun = helper.partition(" ")
    if article not in ("a", "an"):
        return text
    start = text.lower().find(helper) + len(helper)
    rest = text[start:].replace(f" {helper}", f" the {noun}").replace(f" {helper.capitalize()}", f" The {noun}")
    return text[:start] + rest


def _cast(rng: random.Random, about: str | None) -> dict[str, str]:
    slots = person(rng)
    kind_of = about or (rng.choice(WORDS["creature"]) if rng.random() < 0.4 else slots["child"])
    friend = person(rng)
    while friend["name"] == slots["name"]:
        friend = person(rng)
    return slots | {
        "kind_of": kind_of,
        "friend": friend["name"],
        "friend_kind": friend["child"] if kind_of in ("girl", "boy") else rng.choice(WORDS["creature"]),
        "toy": rng.choice(WORDS["toy"]),
        "helper": rng.choice(WORDS["helper"]),
        "treasure": rng.choice(WORDS["treasure"]),
    }
