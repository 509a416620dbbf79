"""The random checkpoints of chapter 02 are the model that is returned, and no parameter of them is trivial."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from minillm.book.random_models import random_checkpoint


def test_the_checkpoint_is_the_model_that_is_returned(tmp_path):
    model = random_checkpoint(tmp_path, "qwen2", num_hidden_layers=1)
    saved = load_file(tmp_path / "model.safetensors")
    assert model.config.num_hidden_layers == 1 and model.config.hidden_size == 64
    weights = model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in saved.items())
    assert all(tensor.std() > 0 for name, tensor in saved.items() if "norm" in name or "bias" in name)
