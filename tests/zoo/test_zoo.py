"""The corpus tells the truth, twice the same; the bundled models are what the loaders expect."""

from __future__ import annotations

import json
import random
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minillm import zoo
from minillm.zoo import corpus, tokenizer as bpe
from minillm.zoo.words import WORDS, expand

SEEDS = (corpus.TRAIN_SEED, corpus.HELD_OUT_SEED)
MAX_BYTES = 25_000_000


@pytest.mark.parametrize("task", corpus.WRITERS)
def test_a_document_is_a_function_of_task_seed_and_index(task):
    assert [corpus.document(task, 7, i) for i in range(20)] == [corpus.document(task, 7, i) for i in range(20)]
    assert len({corpus.document(task, 7, i).text for i in range(20)}) > 15


def test_the_stream_can_be_entered_anywhere():
    whole = corpus.documents(3)
    first = [next(whole) for _ in range(30)]
    later = corpus.documents(3, start=20)
    assert [next(later) for _ in range(10)] == first[20:]
    assert {document.task for document in first} == set(corpus.MIXTURE)


def test_the_mixture_is_a_distribution_over_the_writers():
    assert sum(corpus.MIXTURE.values()) == pytest.approx(1)
    assert set(corpus.MIXTURE) == set(corpus.WRITERS)


@pytest.mark.parametrize("task", [task for task in corpus.WRITERS if task != "chat"])  # small talk is soon told
def test_held_out_text_is_not_training_text(task):
    train = {corpus.document(task, corpus.TRAIN_SEED, i).text for i in range(500)}
    assert not train & {document.text for document in corpus.held_out(task, 200)}


@pytest.mark.parametrize("task", corpus.WRITERS)
def test_prompt_and_answer_are_the_text(task):
    for document in corpus.held_out(task, 50):
        for prompt, answer in document.questions:
            assert document.text.startswith(prompt + answer) and answer
        assert (not document.questions) == (task == "story")


def test_an_unknown_task_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'poem'.*story, arithmetic"):
        corpus.document("poem", 0, 0)


def solve(question: str) -> int:
    """Read the word problem sentence by sentence and keep count, knowing nothing of how it was written."""
    total = None
    for sentence in re.split(r"(?<=[.?]) ", question):
        numbers = [int(n) for n in re.findall(r"\d+", sentence)]
        if "How many" in sentence:
            return total
        if total is None:
            total = numbers[0] * (numbers[1] if len(numbers) == 2 else 1)
        elif "double" in sentence:
            total *= 2
        elif "times as many" in sentence:
            total *= numbers[0]
        elif "more" in sentence or sentence.startswith("A friend"):
            total += numbers[0]
        elif re.search(r"\b(gives|sells|loses|drops|lost|taken)\b", sentence):
            total -= numbers[0]
        else:
            raise AssertionError(f"what does this do? {sentence!r}")
    raise AssertionError(f"nothing is asked in {question!r}")


@pytest.mark.parametrize("seed", SEEDS)
def test_arithmetic_is_right(seed):
    steps_seen = set()
    for index in range(300):
        [(prompt, answer)] = corpus.document("arithmetic", seed, index).questions
        *working, last = answer.strip().removesuffix(".").split(". ")
        steps_seen.add(len(working))
        result = None
        for step in working:
            a, sign, b, equals, c = step.split()
            assert (sign, equals) in {("+", "="), ("-", "="), ("times", "is")}
            assert int(c) == {"+": int(a) + int(b), "-": int(a) - int(b), "times": int(a) * int(b)}[sign]
            assert result is None or result in (int(a), int(b)), f"a step does not go on from the last: {answer}"
            result = int(c)
        assert last == f"The answer is {result}"
        assert solve(prompt.removeprefix("Question: ").removesuffix("\nAnswer:")) == result, prompt
    assert steps_seen == {1, 2, 3, 4, 5}  # tens and ones are added apart


@pytest.mark.parametrize("seed", SEEDS)
def test_recall_answers_stand_in_the_text(seed):
    for index in range(200):
        document = corpus.document("recall", seed, index)
        text = document.text.split("\nQuestion:")[0]
        facts = dict(re.findall(r"[Tt]he number of (\w+) is (\d{3})\.", text))
        for prompt, answer in document.questions:
            key = re.findall(r"What is the number of (\w+)\?\nAnswer:$", prompt)[0]
            assert answer == f" The number of {key} is {facts[key]}."


def test_recall_can_be_made_longer():
    document = corpus.document("recall", 1, 0, num_facts=20, num_fillers=0, num_questions=3)
    assert len(document.questions) == 3
    assert len(re.findall(r"\b\d{3}\b", document.text.split("\nQuestion")[0])) == 20


@pytest.mark.parametrize("seed", SEEDS)
def test_json_is_json_and_says_what_the_text_says(seed):
    for index in range(300):
        [(prompt, answer)] = corpus.document("json", seed, index).questions
        text, fields = re.fullmatch(r"Text: (.*)\nFields: (.*)\nJSON:", prompt).groups()
        values = json.loads(answer)
        assert list(values) == fields.split(", ") and len(values) >= 2
        for value in values.values():
            assert re.search(rf"\b{value}\b", text), (value, text)


def test_chat_turns_remember_what_was_said():
    asked = 0
    for document in corpus.held_out("chat", 300):
        assert document.text.startswith("<|user|>") and document.text.endswith("<|end|>")
        said = re.search(
            r"<\|user\|>(?:Hello, I am (\w+)\.|Hi! My name is (\w+)\.|Good morning, (\w+) here\.)", document.text
        )
        for name in re.findall(r"Your name is (\w+)\.", document.text):
            assert name in said.groups()
            asked += 1
    assert asked > 50


def test_stories_are_told_in_many_ways_and_without_holes():
    stories = [document.text for document in corpus.held_out("story", 300)]
    assert len({story.split(".")[0] for story in stories}) > 150
    for story in stories:
        assert not re.search(r"[\[\]{}<>|]|  | \.|\b[Aa] [aeiou]", story), story
        assert all(part[0].isupper() or part[0] == '"' for part in story.split("\n\n")), story
    assert len({word for story in stories for word in re.findall(r"[A-Za-z]+", story)}) > 600


def test_a_template_is_filled():
    assert expand("a {thing}. it is", random.Random(0), {"thing": "owl"}) == "An owl. It is"
    assert {expand("<day>", random.Random(i)) for i in range(100)} == set(WORDS["day"])


@pytest.fixture(scope="module")
def learned():
    return bpe.learn(vocab_size=512, num_documents=200)


def test_the_tokenizer_loses_nothing_and_keeps_digits_apart(learned):
    wrapped = bpe.wrap(learned, 256)
    for text in [corpus.document(task, 5, 0).text for task in ("story", "arithmetic", "recall", "json")] + [
        "naïve café 东京 🦊\n\t x"
    ]:
        assert wrapped.decode(wrapped.encode(text), skip_special_tokens=True) == text
    assert wrapped.tokenize("12345") == list("12345")
    assert wrapped.encode("a")[0] == wrapped.bos_token_id == 0 and wrapped.eos_token_id == 1


def test_the_chat_template_writes_what_the_corpus_writes(learned):
    wrapped = bpe.wrap(learned, 256)
    messages = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello! How can I help you?"},
        {"role": "user", "content": "Thank you!"},
    ]
    text = wrapped.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|begin|><|user|>Hello!<|assistant|>Hello! How can I help you?<|end|><|user|>Thank you!<|assistant|>"
    )


def test_the_bundled_models_are_there_and_small():
    assert list(zoo.bundled()) == ["tinyworld", "tinyworld-moe", "tinyworld-draft"]
    files = [file for folder in zoo.bundled().values() for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) < MAX_BYTES
    assert not [file.name for file in files if file.suffix in (".bin", ".pt")]


@pytest.mark.parametrize("name", zoo.bundled())
def test_a_bundled_model_loads_in_transformers_and_speaks(name):
    folder = zoo.bundled()[name]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (
        model.config.model_type == ("mixtral" if name == "tinyworld-moe" else "llama")
        and model.config.max_position_embeddings >= 1024
    )
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.tokenize("207") == ["2", "0", "7"] and tokenizer.chat_template
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(ids, max_new_tokens=20, do_sample=False)[0], skip_special_tokens=True)
    words = {word.lower() for i in range(300) for word in re.findall(r"[A-Za-z]+", corpus.document("story", 0, i).text)}
    said = re.findall(r"[A-Za-z]+", text)[:-1]
    assert len(said) > 8 and {word.lower() for word in said} <= words, text


def test_the_bundled_models_share_one_tokenizer():
    texts = [(folder / "tokenizer.json").read_text() for folder in zoo.bundled().values()]
    assert len(set(texts)) == 1


@pytest.mark.parametrize("name", zoo.bundled())
def test_a_bundled_model_has_learned_its_corpus(name):
    """Perplexity on held-out stories, far below what a model of letters or of words alone would reach."""
    folder = zoo.bundled()[name]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(document.text, return_tensors="pt").input_ids for document in corpus.held_out("story", 8)]
    with torch.inference_mode():
        loss = sum(float(model(row, labels=row).loss) for row in ids) / len(ids)
    assert torch.tensor(loss).exp() < 12
