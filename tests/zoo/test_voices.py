"""The voices are exact, and the bundled adapters are there: tests/engine/test_lora_voices.py lets them speak."""

from __future__ import annotations

import random
import re

import pytest
import torch
from safetensors.torch import load_file

from minillm import zoo
from minillm.zoo import corpus, voices

MAX_BYTES = 1_000_000


@pytest.mark.parametrize("voice", voices.VOICES)
def test_a_document_is_in_its_voice_and_in_no_other(voice):
    documents = [voices.document(voice, 1, index) for index in range(120)]
    assert documents == [voices.document(voice, 1, index) for index in range(120)]
    assert not {document.text for document in documents} & {voices.document(voice, 0, i).text for i in range(120)}
    for document in documents:
        for _, answer in document.questions:
            assert {name for name, one in voices.VOICES.items() if one.heard(answer)} == {voice}, answer
        for text, is_answer in document.segments:
            assert is_answer or not any(one.heard(text) for one in voices.VOICES.values())


@pytest.mark.parametrize("voice", voices.VOICES)
def test_a_story_that_is_cut_off_is_in_its_voice_too(voice):
    for index in (0, 1, 2, 4, 5, 6):
        [(_, answer)] = voices.document(voice, 1, index).questions
        for cut in range(140, len(answer)):
            assert voices.VOICES[voice].heard(answer[:cut]), answer[:cut]


def test_plain_stories_are_in_no_voice():
    for document in corpus.held_out("story", 300):
        rest = voices.cut_opening(document.text)[1]
        assert not any(voice.heard(rest) for voice in voices.VOICES.values()), rest


def test_a_voice_keeps_the_story():
    """The same words in the same order, once the voice is taken out again."""
    for document in corpus.held_out("story", 100):
        rest = voices.cut_opening(document.text)[1]
        told = voices.news(rest, random.Random(0))
        for piece in (*voices.SOURCES, voices.QUOTE, voices.END_OF_QUOTE, voices.SIGN_OFF):
            told = told.replace(piece, "")
        assert told.split() == re.sub(r"(^|\s)The end\.", "", rest).split()
        told = re.sub("|".join(re.escape(cry) for cry in voices.CRIES), "", voices.pirate(rest, random.Random(0)))
        assert len(told.split()) == len(rest.split())


@pytest.mark.parametrize(
    "voice, text",
    [
        ("pirate", "She liked to sing."),
        ("pirate", "Arr! She saw the sea."),
        ("pirate", "She saw th' sea. Arr!"),
        ("pirate", ""),
        ("news", "Just in: She liked to sing. She was glad."),
        ("news", 'Just in: She sang. "I am glad," said Tom.'),
        ("news", "Just in: She"),
        ("news", ""),
    ],
)
def test_what_breaks_the_rule_is_not_in_the_voice(voice, text):
    assert not voices.VOICES[voice].heard(text)


def test_direct_speech_belongs_to_its_sentence():
    paragraph = 'He said: "No. Never!" "Why?" asked Tom. "I see," said Mira. "Come. Now." It rained'
    assert voices.sentences(paragraph) == [
        'He said: "No. Never!"', '"Why?" asked Tom.', '"I see," said Mira.', '"Come. Now."', "It rained",
    ]  # fmt: skip


def test_an_unknown_voice_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'opera'.*pirate, news"):
        voices.document("opera", 0, 0)


def test_the_bundled_adapters_are_there_and_small():
    assert list(zoo.bundled_adapters()) == ["tinyworld-news", "tinyworld-pirate"]
    assert list(zoo.bundled()) == ["tinyworld", "tinyworld-moe", "tinyworld-draft"]
    for folder in zoo.bundled_adapters().values():
        assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        assert sum(file.stat().st_size for file in folder.iterdir()) <= MAX_BYTES
        assert {tensor.dtype for tensor in load_file(folder / "adapter_model.safetensors").values()} == {torch.bfloat16}
