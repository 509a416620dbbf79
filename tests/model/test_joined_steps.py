"""Steps made by hand for a decoder in one call: other rooms, other indices, and a model that changes after a step."""

from __future__ import annotations

import pytest
import torch

from minillm import LLM
from minillm.kernels import native, native_structs
from minillm.model import joined
from minillm.model.batch import ForwardBatch
from minillm.model.layers import RMSNorm
from tests.helpers.joined import calls, load

__all__ = ["calls"]
pytestmark = pytest.mark.skipif(native.library() is None, reason="one call for all layers is for the CPU's kernels")


def step_of(llm: LLM, **other) -> ForwardBatch:
    """A prompt of three tokens, in pages that the engine has not given out."""
    batch = ForwardBatch.single([4, 5, 6], all_logits=True)
    batch.block_table, batch.slot_mapping = torch.zeros(1, 8, dtype=torch.int32), torch.arange(3)
    for name, value in other.items():
        setattr(batch, name, value)
    return batch


@pytest.mark.parametrize("wanted", [[-1], [3], [0, 2**40]])
def test_logits_of_tokens_that_a_step_does_not_have(wanted, tmp_path):
    llm = load(tmp_path, "llama-mha")
    with pytest.raises(IndexError, match=r"of a step of 3: count from 0"):
        llm.model.forward(step_of(llm, logits_indices=torch.tensor(wanted)), llm.engine.runner.attention)


@pytest.mark.parametrize("room", [
    lambda v: torch.empty(3, v), lambda v: torch.empty(3, v, dtype=torch.bfloat16),
    lambda v: torch.empty(3, v, dtype=torch.float64), lambda v: torch.empty(3, 2 * v)[:, ::2],
    lambda v: torch.empty(4, 3, v),
])  # fmt: skip
def test_logits_go_where_they_are_wanted(room, tmp_path, calls):
    llm = load(tmp_path, "llama-mha")
    forward, attention = llm.model.forward, llm.engine.runner.attention
    logits, out = forward(step_of(llm), attention), room(llm.model.config.vocab_size)
    assert forward(step_of(llm), attention, out).data_ptr() == out.data_ptr()
    assert torch.equal(out.float(), logits.to(out.dtype).float().expand_as(out)) and set(calls) == {"run_decoder"}


def test_room_for_fewer_logits_is_refused(tmp_path):
    llm = load(tmp_path, "llama-mha")
    with pytest.raises(RuntimeError, match="must match"):
        llm.model.forward(step_of(llm), llm.engine.runner.attention, torch.empty(2, llm.model.config.vocab_size))


@pytest.mark.parametrize("name, value", [
    ("logits_indices", torch.tensor([2, 0], dtype=torch.int32)), ("positions", torch.arange(3, dtype=torch.int32)),
    ("logits_indices", torch.tensor(1)), ("logits_indices", torch.tensor([0, 9, 2, 9])[::2]),
])  # fmt: skip
def test_indices_of_other_kinds_are_left_to_torch(name, value, tmp_path, monkeypatch):
    llm = load(tmp_path, "llama-mha")
    attention = llm.engine.runner.attention
    try:
        together = llm.model.forward(step_of(llm, **{name: value}), attention)
    except Exception as error:
        together = str(error)
    monkeypatch.setattr(joined, "JOINED_MODEL", False)
    try:
        assert torch.equal(llm.model.forward(step_of(llm, **{name: value}), attention), together)
    except RuntimeError as error:
        assert str(error) == together


def change_by_data(model) -> None:
    model.norm.weight.data = model.norm.weight.flip(0).contiguous()


def change_frequencies(model) -> None:
    model.rotary.frequencies = model.rotary.frequencies * 2


def change_scale(model) -> None:
    model.rotary.cos_scale = 2.0


def change_eps(model) -> None:
    model.norm.eps = 10.0


def change_bias(model) -> None:
    model.lm_head.bias = torch.nn.Parameter(torch.randn(model.config.vocab_size))


def change_kind(model) -> None:
    class Doubled(RMSNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    model.norm.__class__ = Doubled


def change_module(model) -> None:
    model.norm = torch.nn.Identity()


def change_method(model) -> None:
    logits = model.logits
    model.logits = lambda hidden, out=None: logits(-hidden, out)


def widen_head(model) -> None:
    rows = torch.randn(4 * model.config.vocab_size, model.config.hidden_size)
    model.lm_head.panels, model.lm_head.out_features = native.pack(rows), len(rows)


CHANGES = [
    change_by_data, change_frequencies, change_scale, change_eps, change_bias, change_kind, change_module,
    change_method, widen_head,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_after_a_step_is_what_computes(change, tmp_path):
    llm = load(tmp_path, "llama-mha")
    attention = llm.engine.runner.attention
    before = llm.model.forward(step_of(llm), attention)
    change(llm.model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joined, "JOINED_MODEL", False)
        expected = llm.model.forward(step_of(llm), attention)
    assert not torch.equal(expected[:, : before.shape[1]], before)
    assert torch.equal(llm.model.forward(step_of(llm), attention), expected)


def test_a_cache_of_fewer_layers_is_refused(tmp_path):
    llm = load(tmp_path, "llama-mha")
    attention = llm.engine.runner.attention
    attention.places = native_structs.addresses_of(attention.pages[:2]), None
    with pytest.raises(IndexError, match="the model has 3 layers, the cache pages of 2"):
        llm.model.forward(step_of(llm), attention)
