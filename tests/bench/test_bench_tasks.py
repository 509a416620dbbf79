"""The tasks of the corpus, asked at toy size: what is counted as right."""

from __future__ import annotations

import json
import math

import pytest
import torch

from minillm import LLM
from minillm.bench import decode, tasks
from minillm.zoo import corpus
from tests.bench.test_bench import CPU, TOY


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return decode.write_random_checkpoint(TOY, tmp_path_factory.mktemp("toy"))


def test_questions_are_cut_where_training_text_was_cut(toy):
    tokenizer = LLM(str(toy), device="cpu").get_tokenizer()
    document = corpus.document("recall", 1, 0)
    asked = tasks.questions(document, tokenizer)
    assert [q.answer for q in asked] == [answer for _, answer in document.questions]
    for question, (prompt, _) in zip(asked, document.questions):
        assert tokenizer.decode(question.prompt_token_ids, skip_special_tokens=True) == prompt
        assert question.prompt_token_ids[0] == tokenizer.bos_token_id
        assert question.prompt_token_ids.count(tokenizer.bos_token_id) == 1
    [story] = tasks.questions(corpus.document("story", 1, 0), tokenizer)
    text = tokenizer.decode(story.prompt_token_ids, skip_special_tokens=True)
    assert corpus.document("story", 1, 0).text.startswith(text) and text[-1] in ".!?"


@pytest.mark.parametrize(
    "task, text, expected, right",
    [
        ("recall", " 441", " 441", True),
        ("recall", " 44", " 441", False),
        ("recall", " 4411", " 441", False),
        ("json", ' {"a": 1}', ' {"a": 1}', True),
        ("json", ' {"a": 2}', ' {"a": 1}', False),
        ("arithmetic", " 2 + 2 = 5. The answer is 4.", " 2 + 2 = 4. The answer is 4.", True),
        ("arithmetic", " The answer is 41.", " The answer is 4.", False),
        ("arithmetic", " Four.", " The answer is 4.", False),
        ("story", " The brave fox was happy.", "", True),
        ("story", " The brave foz was happy.", "", False),
    ],
)
def test_what_counts_as_right(task, text, expected, right):
    assert tasks.is_right(task, text, expected) is right


def test_the_corpus_knows_its_own_words():
    assert not [
        word
        for task in corpus.WRITERS
        for document in corpus.held_out(task, 150)
        for word in tasks.unknown_words(document.text)
    ]
    assert 800 < len(tasks.lexicon()) < 3000


def test_scores_of_a_random_model(toy, monkeypatch):
    monkeypatch.setattr(tasks, "MAX_TOKENS", dict.fromkeys(tasks.MAX_TOKENS, 6))
    llm, heard = LLM(str(toy), device="cpu", dtype="float32"), []
    scores = tasks.evaluate(llm, num_documents=2, on_step=heard.append)
    assert [score.task for score in scores] == list(corpus.WRITERS) and len(heard) == 2 * len(scores)
    by_task = {score.task: score for score in scores}
    assert by_task["arithmetic"].asked == by_task["json"].asked == by_task["story"].asked == 2
    assert by_task["recall"].asked == sum(len(d.questions) for d in corpus.held_out("recall", 2))
    assert by_task["chat"].asked == 0
    assert all(score.right == 0 for score in scores if score.task != "story")
    assert all(score.perplexity > 100 for score in scores)
    measured = tasks.result(scores, "toy", 2, 1, "minillm bench tasks", CPU)
    assert json.loads(json.dumps(measured))["figures"]["json"]["asked"] == 2 and measured["name"] == "tasks-toy"
    assert tasks.table(scores).row_count == 5


def test_perplexity_equals_that_of_transformers(toy):
    from transformers import AutoModelForCausalLM

    llm, document = LLM(str(toy), device="cpu", dtype="float32"), corpus.document("json", 1, 3)
    losses = tasks.token_losses(llm, [document])
    tokenizer = llm.get_tokenizer()
    ids = [tokenizer.bos_token_id] + [
        t for text, _ in document.segments for t in tokenizer.encode(text, add_special_tokens=False)
    ]
    model = AutoModelForCausalLM.from_pretrained(toy, dtype=torch.float32).eval()
    row = torch.tensor([ids])  # [1, num_tokens]
    with torch.inference_mode():
        expected = float(model(row, labels=row).loss)
    assert len(losses) == len(ids) - 1
    assert sum(losses) / len(losses) == pytest.approx(expected, abs=1e-4)


def test_the_margin_is_wilsons():
    assert tasks.Score("json", 100, 50, 1.0).margin == pytest.approx(0.0962, abs=1e-3)
    assert 0 < tasks.Score("json", 100, 100, 1.0).margin < 0.03
    assert math.isnan(tasks.Score("chat", 0, 0, 1.0).share)


def test_the_text_that_training_read_is_refused(toy):
    with pytest.raises(ValueError, match="seed=0"):
        tasks.evaluate(None, 1, seed=corpus.TRAIN_SEED)
