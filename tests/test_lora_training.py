"""Training adapters at toy size: deterministic, resumable bit for bit, and what it writes is PEFT's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from minillm import training
from minillm.training import lora
from minillm.zoo import tokenizer as bpe
from tests.test_training import assert_same

TOY = lora.LoRAConfig("pirate", rank=3, alpha=6.0, num_steps=10, rows_per_batch=4, length=48, lr=0.02)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a small Llama with random weights."""
    folder, tokenizer = tmp_path_factory.mktemp("base"), bpe.learn(vocab_size=384, num_documents=60)
    shape = training.TrainingConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=64)
    torch.manual_seed(0)
    training.save(LlamaForCausalLM(training.llama_config(shape, tokenizer)), tokenizer, folder, shape)
    return folder


def train(base, out, config=TOY, **options) -> list[float]:
    """The losses of the steps that this call has made."""
    losses = []
    lora.train(config, out, CPU, lambda progress: losses.append(progress.loss), base=base, **options)
    return losses


def weights(folder):
    return load_file(folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    return out, train(base, out)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(base, trained, tmp_path):
    resumed = [loss for _ in range(4) for loss in train(base, tmp_path, stop_after=3)]  # 3 + 3 + 3 + 1 steps
    assert resumed == trained[1] and len(resumed) == TOY.num_steps
    assert_same(weights(trained[0]), weights(tmp_path))
    assert not (tmp_path / "training.pt").exists()


def test_the_seed_and_the_voice_decide(base, trained, tmp_path):
    assert train(base, tmp_path / "same", stop_after=2) == trained[1][:2]
    for name, other in {"seed": replace(TOY, seed=1), "voice": replace(TOY, voice="news")}.items():
        assert train(base, tmp_path / name, other, stop_after=2) != trained[1][:2]


def test_another_configuration_is_refused(base, tmp_path):
    train(base, tmp_path, stop_after=1)
    assert not (tmp_path / "adapter_config.json").exists()
    with pytest.raises(ValueError, match="another configuration"):
        train(base, tmp_path, replace(TOY, rank=4))


def test_the_loss_falls_and_the_base_is_as_it_was(base, tmp_path):
    before = load_file(base / "model.safetensors")
    losses = train(base, tmp_path, replace(TOY, num_steps=30))
    assert max(losses[-5:]) < min(losses[:5])
    assert_same(before, load_file(base / "model.safetensors"))


def test_peft_loads_what_is_written_with_equal_logits(base, trained):
    peft = pytest.importorskip("peft")
    ids = torch.randint(4, 384, (2, 20), generator=torch.Generator().manual_seed(0))

    def model():
        return LlamaForCausalLM.from_pretrained(base, dtype=torch.float32).eval()

    ours, stored = model(), weights(trained[0])
    for name, layer in lora.attach(ours, TOY).items():
        layer.lora_a.data = stored.pop(f"base_model.model.{name}.lora_A.weight").float()
        layer.lora_b.data = stored.pop(f"base_model.model.{name}.lora_B.weight").float()
    assert not stored
    theirs = peft.PeftModel.from_pretrained(model(), trained[0])
    assert theirs.peft_config["default"].r == 3 and theirs.peft_config["default"].lora_alpha == 6.0
    with torch.inference_mode():
        expected, plain = ours(ids).logits, model()(ids).logits
        torch.testing.assert_close(theirs(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert (expected - plain).abs().max() > 0.01


def test_the_loss_counts_the_voice_and_not_the_prompt(base):
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    config = replace(TOY, rows_per_batch=8, length=500)
    tokens, loss_weights = lora.batch(config, 3, tokenizer)
    again, _ = lora.batch(config, 3, tokenizer)
    assert tokens.shape == loss_weights.shape and (tokens == again).all() and len(tokens) == 8
    assert (tokens[:, 0] == tokenizer.token_to_id(bpe.BEGIN)).all() and set(loss_weights.flatten()) == {0.0, 1.0}
    for row, weight in zip(tokens, loss_weights):
        counted = tokenizer.decode(row[weight == 1].tolist(), skip_special_tokens=True)
        assert counted.lstrip().startswith("Arr!") and row[weight == 1][-1] == tokenizer.token_to_id(bpe.END)
        assert "Arr!" not in tokenizer.decode(row[weight == 0].tolist())


def test_run_voice_refuses_what_it_cannot_do(trained, tmp_path):
    with pytest.raises(ValueError, match=r"'opera'.*pirate, news"):
        lora.run_voice("opera", tmp_path)
    with pytest.raises(FileExistsError, match="finished adapter"):
        lora.run_voice("pirate", trained[0])
