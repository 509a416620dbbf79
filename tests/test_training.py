"""Training at toy size: deterministic, resumable bit for bit, refusing what does not belong together."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from minillm import training
from minillm.zoo import tokenizer as bpe

TOY = training.TrainingConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=64,
    context=64,
    tokens=2560,
    tokens_per_batch=256,
    stages=((0.5, 32), (1.0, 64)),
)
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="training needs torch >= 2.9, which has Muon")


@pytest.fixture(scope="module")
def tokenizer():
    return bpe.learn(vocab_size=384, num_documents=60)


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a), [name for name in a if not torch.equal(a[name], b[name])]


@pytest.fixture(scope="module")
def trained(tokenizer, tmp_path_factory):
    losses = []
    out = training.train(TOY, tokenizer, tmp_path_factory.mktemp("whole"), CPU, lambda p: losses.append(p.loss))
    return out, losses


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(trained, tokenizer, tmp_path):
    whole, losses = trained
    resumed = []
    for _ in range(4):  # 3 + 3 + 3 + 1 steps
        training.train(TOY, tokenizer, tmp_path, CPU, lambda p: resumed.append(p.loss), stop_after=3)
    assert resumed == losses
    assert len(losses) == TOY.num_steps == 10
    assert_same(weights(whole), weights(tmp_path))


def test_the_state_is_gone_when_the_model_is_there(trained, tokenizer, tmp_path):
    assert not (trained[0] / "training.pt").exists()
    training.train(TOY, tokenizer, tmp_path, CPU, stop_after=2)
    assert (tmp_path / "training.pt").exists() and not (tmp_path / "model.safetensors").exists()


def test_the_seed_decides(trained, tokenizer, tmp_path):
    same, other = [], []
    training.train(TOY, tokenizer, tmp_path / "same", CPU, lambda p: same.append(p.loss), stop_after=3)
    training.train(
        replace(TOY, seed=1), tokenizer, tmp_path / "other", CPU, lambda p: other.append(p.loss), stop_after=3
    )
    assert same == trained[1][:3]
    assert other != same


def test_another_configuration_is_refused(tokenizer, tmp_path):
    training.train(TOY, tokenizer, tmp_path, CPU, stop_after=1)
    with pytest.raises(ValueError, match="another configuration"):
        training.train(replace(TOY, muon_lr=0.01), tokenizer, tmp_path, CPU)


def test_another_tokenizer_is_refused(tokenizer, tmp_path):
    training.train(TOY, tokenizer, tmp_path, CPU, stop_after=1)
    with pytest.raises(ValueError, match="another tokenizer"):
        training.train(TOY, bpe.learn(vocab_size=384, num_documents=20), tmp_path, CPU)


def test_the_loss_falls(tokenizer, tmp_path):
    losses = []
    config = replace(TOY, tokens=60 * 256, repeats=0.0, stages=((1.0, 64),))
    training.train(config, tokenizer, tmp_path, CPU, lambda p: losses.append(p.loss))
    assert losses[0] == pytest.approx(np.log(384), rel=0.05)  # it begins by knowing nothing
    assert np.mean(losses[-5:]) < 0.85 * losses[0]


def test_what_is_saved_loads_in_transformers(trained):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(trained[0]), AutoTokenizer.from_pretrained(trained[0])
    assert model.config.num_hidden_layers == 2 and model.config.eos_token_id == tokenizer.eos_token_id
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    assert ids[0, 0] == tokenizer.bos_token_id
    assert model(ids).logits.shape == (1, ids.shape[1], 384)
    assert weights(trained[0])["model.norm.weight"].dtype == torch.bfloat16


def test_batches_begin_with_a_document_and_weigh_answers(tokenizer):
    config = replace(TOY, repeats=0.0, stages=((1.0, 64),))
    tokens, loss_weights = training.batch(config, 5, tokenizer)
    assert tokens.shape == loss_weights.shape == (4, 65)
    assert (tokens[:, 0] == tokenizer.token_to_id(bpe.BEGIN)).all()
    assert set(np.unique(loss_weights)) <= {1.0, config.answer_weight}
    again, _ = training.batch(config, 5, tokenizer)
    other, _ = training.batch(config, 6, tokenizer)
    elsewhere, _ = training.batch(replace(config, seed=1), 5, tokenizer)
    assert (again == tokens).all() and not (other == tokens).all() and not (elsewhere == tokens).all()


def test_the_weight_of_an_answer_lies_on_its_tokens(tokenizer):
    ids, is_answer = next(
        pair
        for pair in training._token_stream(tokenizer, random.Random(3), repeats=False)
        if "The answer is" in tokenizer.decode(pair[0])
    )
    answer = tokenizer.decode([token for token, marked in zip(ids, is_answer) if marked])
    assert answer.rstrip(".").split()[-2] == "is" and "Question" not in answer


def test_the_learning_rate_warms_up_and_ends_near_zero():
    scales = [training.learning_rate_scale(TOY, step) for step in range(TOY.num_steps)]
    long = replace(TOY, tokens=256 * 1000)
    assert max(scales) <= 1.0
    assert training.learning_rate_scale(long, 0) < 0.1
    assert training.learning_rate_scale(long, 500) == 1.0
    assert 0 < training.learning_rate_scale(long, 999) < 0.01


def test_run_preset_refuses_what_it_cannot_do(trained, tmp_path):
    with pytest.raises(ValueError, match="tinyworld-draft"):
        training.run_preset("giant", tmp_path)
    with pytest.raises(FileExistsError, match="finished model"):
        training.run_preset("tinyworld", trained[0])
