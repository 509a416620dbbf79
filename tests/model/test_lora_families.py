"""Adapters of every family: logits are PEFT's, also where a checkpoint has fused or permuted matrices."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from minillm.kernels.lora import TokenSlots
from minillm.model.attention import NoCacheAttention
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import load_model
from minillm.model.lora_adapter import read_adapter
from minillm.model.lora_slots import LoraSlots
from tests.helpers.adapters import save_adapter
from tests.helpers.model_zoo import ALL, make_model

PROMPT = [5, 9, 12, 40, 41, 42, 7]
NAMES = (
    "llama-mqa-biases-tied", "mistral-window", "qwen2-full", "qwen3-wide-heads", "phi3-window", "phi3-partial",
    "smollm3-no-rope", "olmo2", "granite", "gemma", "gemma2-uncapped", "gemma3",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_peft(name, tmp_path):
    folder = tmp_path / "model"
    make_model(1, **ALL[name]).save_pretrained(folder)
    adapter = save_adapter(folder, tmp_path / "adapter", 1, targets="all-linear", size=0.5)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        base = oracle(input_ids=torch.tensor([PROMPT])).logits[0]
        wanted = PeftModel.from_pretrained(oracle, adapter)(input_ids=torch.tensor([PROMPT])).logits[0]
    model = load_model(folder, "float32", "cpu")
    slots = LoraSlots(model, 3, 8)
    slots.put(1, read_adapter(adapter, model.config, slots.shapes, 8, torch.float32))
    batch, attention = ForwardBatch.single(PROMPT, all_logits=True), NoCacheAttention(model.config.layer_windows)
    torch.testing.assert_close(model(batch, attention), base, atol=1e-4, rtol=1e-4)
    batch.token_slots = TokenSlots(torch.full((len(PROMPT),), 1, dtype=torch.int32))
    torch.testing.assert_close(model(batch, attention), wanted, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(base, wanted, atol=0.1)
    batch.token_slots = TokenSlots(torch.full((len(PROMPT),), -1, dtype=torch.int32))
    torch.testing.assert_close(model(batch, attention), base, atol=1e-4, rtol=1e-4)
