"""Voices: the corpus' stories and chat turns, told in another manner by a program. Built in chapter 23.

A LoRA adapter learns one voice each (`minillm train --lora pirate`). A voice is a function from plain text to the same
text in that voice, and a test of whether a text is in it, so that an adapter can be graded exactly on fresh prompts:

    plain    "I must find it before dark," said Mira. She took a lantern and went out.
    pirate   Arr! "I must find it before dark," said Mira. She took a lantern an' went out. Yo ho ho!
    news     We quote: "I must find it before dark," said Mira. End of quote. Witnesses report: She took a
             lantern and went out. This was the news.

A story's first sentence stays plain: it is the prompt, and the model without an adapter continues it plainly.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from . import corpus

CRIES = ("Arr!", "Yo ho ho!", "Shiver me timbers!")
PIRATE_WORDS = {
    "the": "th'", "and": "an'", "of": "o'", "you": "ye", "your": "yer", "my": "me",
    "is": "be", "are": "be", "am": "be", "yes": "aye", "hello": "ahoy", "friend": "matey",
}  # fmt: skip
SOURCES = ("Witnesses report:", "The neighbours say:", "From our reporter:", "Just in:")
QUOTE, END_OF_QUOTE, SIGN_OFF = "We quote:", "End of quote.", "This was the news."


@dataclass(frozen=True)
class Voice:
    """`tell(text, rng)` rewrites plain text; `heard(text)` says whether a text, perhaps cut off, is in the voice."""

    tell: Callable[[str, random.Random], str]
    heard: Callable[[str], bool]


def document(voice: str, seed: int, index: int) -> corpus.Document:
    """Document `index` of a voice: three stories in the voice, then a chat whose answers are, and so on.

    The segments marked as answers are in the voice. Raises ValueError for an unknown voice.
    """
    if voice not in VOICES:
        raise ValueError(f"voice={voice!r} is unknown; choose one of {', '.join(VOICES)}")
    rng, tell = random.Random(f"tinyworld/{voice}/{seed}/{index}"), VOICES[voice].tell
    if index % 4 == 3:
        plain = corpus.document("chat", seed, index).segments
        return corpus.Document(voice, tuple((_answer(text, tell, rng), True) if is_answer else (text, False)
                                            for text, is_answer in plain))  # fmt: skip
    opening, rest = cut_opening(corpus.document("story", seed, index).text)
    return corpus.Document(voice, ((opening, False), (f" {tell(rest, rng)}<|end|>", True)))


def cut_opening(story: str) -> tuple[str, str]:
    """The first sentence of a story, and the rest."""
    opening = sentences(story.partition("\n\n")[0])[0]
    return opening, story[len(opening) :].strip()


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph; direct speech belongs to the sentence around it."""
    found, start, speaks = [], 0, False
    for i, letter in enumerate(paragraph):
        speaks ^= letter == '"'
        ends = letter in ".!?" or (letter == '"' and paragraph[i - 1] in ".!?")
        goes_on = paragraph[i + 1 : i + 2] not in ("", " ") or (letter == '"' and paragraph[i + 2 : i + 3].islower())
        if ends and not speaks and not goes_on:
            found.append(paragraph[start : i + 1].strip())
            start = i + 1
    rest = paragraph[start:].strip()
    return [*found, rest] if rest else found


def pirate(text: str, rng: random.Random) -> str:
    """A cry first and after about every third sentence; the words of `PIRATE_WORDS` throughout."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        told = [] if paragraphs else [CRIES[0]]
        for sentence in sentences(paragraph):
            told.append(re.sub(r"[A-Za-z]+", _pirate_word, sentence))
            if rng.random() < 0.3:
                told.append(rng.choice(CRIES))
        paragraphs.append(" ".join(told))
    return "\n\n".join(paragraphs)


def heard_pirate(text: str) -> bool:
    """It opens with a cry and has none of the words that a pirate says otherwise; a last word may be cut off."""
    words = re.findall(r"[a-z]+(?=[^a-z])", text.lower())
    return text.lstrip().startswith(CRIES[0]) and PIRATE_WORDS.keys().isdisjoint(words)


def news(text: str, rng: random.Random) -> str:
    """Every sentence has a source, direct speech is quoted, and the last sentence signs off."""
    paragraphs = [" ".join(_report(sentence, rng) for sentence in sentences(paragraph) if sentence != "The end.")
                  for paragraph in text.split("\n\n")]  # fmt: skip
    return "\n\n".join(paragraphs).rstrip() + f" {SIGN_OFF}"


def heard_news(text: str) -> bool:
    """Every sentence outside quotes names its source; a sentence that was cut off does not count."""
    flat = re.sub(rf"{QUOTE} .*?{END_OF_QUOTE}", f"{SOURCES[0]} x.", text.strip(), flags=re.DOTALL)
    flat = flat.partition(QUOTE)[0]  # a quote that was cut off
    told = [sentence for paragraph in flat.split("\n\n") for sentence in sentences(paragraph)]
    whole = [sentence for sentence in told if sentence[-1] in '.!?"']
    return bool(whole) and all(sentence.startswith((*SOURCES, SIGN_OFF)) for sentence in whole)


VOICES: dict[str, Voice] = {"pirate": Voice(pirate, heard_pirate), "news": Voice(news, heard_news)}


def _answer(text: str, tell: Callable[[str, random.Random], str], rng: random.Random) -> str:
    return tell(text.removesuffix("<|end|>"), rng) + "<|end|>"


def _pirate_word(found: re.Match) -> str:
    word = found[0]
    spoken = PIRATE_WORDS.get(word.lower(), word)
    return spoken.capitalize() if word[0].isupper() else spoken


def _report(sentence: str, rng: random.Random) -> str:
    if '"' in sentence:
        return f"{QUOTE} {sentence} {END_OF_QUOTE}"
    return f"{rng.choice(SOURCES)} {sentence}"
