"""The words the corpus program draws from, and the small template language. Built in chapter 00.

A template is plain text with three kinds of holes:

* ``[came|ran|hurried]`` picks one of the alternatives (they nest, and may be empty),
* ``<colour>`` draws a fresh word from the list of that name,
* ``{hero}`` fills in a value that is fixed for the whole document.
"""

from __future__ import annotations

import random
import re

WORDS: dict[str, list[str]] = {
    key: [w.strip() for w in text.split(",")]
    for key, text in {
        "girl": (
            "Mira, Anna, Lily, Rosa, Nora, Ella, Ida, Zoe, Maya, Lena, Sara, Clara, June, Tilda, Amina, "
            "Priya, Vera, Hana"
        ),
        "boy": (
            "Tom, Ben, Leo, Max, Sam, Oskar, Finn, Jack, Paul, Noah, Omar, Theo, Hugo, Ravi, Emil, Kenji, Luca, Anton"
        ),
        "creature": "fox, rabbit, bear, mouse, hedgehog, squirrel, owl, frog, badger, duck, goose, turtle, cat, dog, "
        "hare, mole, otter, crow, goat, pony",
        "colour": "red, blue, green, yellow, white, black, brown, grey, orange, purple, pink, silver, golden",
        "thing": "kite, lamp, boat, drum, basket, clock, bell, box, hat, coat, cup, spoon, ladder, bucket, mirror, "
        "pillow, whistle, wagon, candle, blanket, kettle, hammer, brush, chair, map, ring, scarf, bottle, "
        "flute, wheel, button, jar, key, book, stone, feather, shell, rope, lantern, violin",
        "toy": "kite, ball, drum, wooden boat, toy train, doll, whistle, spinning top, paper bird, little cart",
        "place": "village, valley, forest, harbour, farm, small town, island, mill, meadow, castle",
        "spot": "under the old bridge, behind the barn, beside the pond, at the edge of the forest, near the mill, "
        "on top of the hill, by the river, in the tall grass, under the apple tree, next to the well",
        "weather": "sunny, windy, cold, warm, rainy, foggy, bright, quiet, snowy, grey",
        "food": "apple, pear, cake, pie, loaf of bread, bowl of soup, plum, cookie, piece of cheese, pancake, sandwich",
        "fruit": "apple, pear, plum, cherry, orange, banana, peach, lemon, melon, fig",
        "kind": (
            "kind, clever, curious, brave, gentle, cheerful, patient, quiet, careful, stubborn, shy, proud, "
            "honest, lively"
        ),
        "size": "little, small, tiny, big, young, old, tall, round",
        "glad": "happy, glad, proud, pleased, delighted, thankful",
        "sad": "sad, worried, tired, lonely, upset, afraid",
        "helper": "an old fisherman, a wise owl, the baker, a passing farmer, the miller, a friendly goose, "
        "grandmother, the clockmaker, a shepherd, a travelling singer, the lighthouse keeper, an old badger",
        "city": "Paris, Rome, Oslo, London, Berlin, Madrid, Vienna, Lisbon, Athens, Dublin, Prague, Cairo, "
        "Lima, Tokyo, Delhi, Boston, Toronto, Geneva, Naples, Kyoto",
        "job": "baker, teacher, doctor, farmer, painter, driver, nurse, singer, cook, tailor, gardener, pilot, "
        "carpenter, writer, sailor, dentist",
        "day": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
        "sound": "a soft song, a low hum, a strange knock, a tiny cry, a loud splash, a slow creak",
        "treasure": (
            "a smooth stone, a silver coin, an old map, a glass marble, a letter, a golden feather, a brass key"
        ),
        "plant": "sunflower, pumpkin, rose, tomato, bean, cherry tree, carrot, tulip",
        "count": "two, three, four, five, six, seven, ten, a dozen",
        "item": "apples, pears, stamps, shells, marbles, cookies, books, stickers, buttons, pencils, eggs, "
        "coins, cards, flowers, stones, nuts",
        "container": "bags, boxes, baskets, jars, trays, packs",
        "animal": "cat, dog, horse, rabbit, parrot, goat, turtle, pony, duck, hamster",
        "event": "concert, market, picnic, race, meeting, dinner, play, lesson, parade, dance",
    }.items()
}

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_DRAW = re.compile(r"<(\w+)>")
_SLOT = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiouAEIOU]|honest)")


def expand(template: str, rng: random.Random, slots: dict[str, str] | None = None) -> str:
    """Fill every hole of `template`; "a" becomes "an" before a vowel and sentences start with a capital."""
    text = template
    while _CHOICE.search(text):
        text = _CHOICE.sub(lambda m: rng.choice(m.group(1).split("|")), text)
    text = _DRAW.sub(lambda m: rng.choice(WORDS[m.group(1)]), text)
    text = _SLOT.sub(lambda m: slots[m.group(1)], text) if slots else text
    text = _ARTICLE.sub(r"\1n ", re.sub(r" +(?=[ .,!?])", "", text)).strip()
    return re.sub(r"(^|[.!?] )([a-z])", lambda m: m.group(1) + m.group(2).upper(), text)


def person(rng: random.Random) -> dict[str, str]:
    """A name with its pronouns, as slots: name, he, him, his, child."""
    if rng.random() < 0.5:
        return {"name": rng.choice(WORDS["girl"]), "he": "she", "him": "her", "his": "her", "child": "girl"}
    return {"name": rng.choice(WORDS["boy"]), "he": "he", "him": "him", "his": "his", "child": "boy"}
