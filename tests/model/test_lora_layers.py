"""Layers that run as a whole, with adapters: the same numbers as part by part, bit for bit, and in any company."""

from __future__ import annotations

import pytest

from minillm import LLM, LoRARequest, SamplingParams
from minillm.kernels import native, native_decoder
from minillm.model import decoder_layer
from tests.helpers.adapters import save_adapter
from tests.helpers.model_zoo import make_model
from tests.helpers.tiny import VOCAB_SIZE, byte_tokenizer

pytestmark = pytest.mark.skipif(native.library() is None, reason="whole layers are for the CPU's kernels")
# Ranks up to the highest, some matrices or all; what an adapter does not change costs nothing.
KINDS: dict[str, dict] = {
    "all": dict(r=5),
    "k and down": dict(r=64, targets=["k_proj", "down_proj"]),
    "o and gate": dict(r=16, targets=["o_proj", "gate_proj"]),
    "one layer": dict(r=8, targets=["q_proj", "v_proj", "up_proj"], layers_to_transform=[1]),
}
LENGTHS = (3, 190, 41, 75, 1, 130)  # together more than the threads share product by product
MIXED = [None, *KINDS, "all"]
SCORED = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
Told = tuple[list[int], list[dict[int, float]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("adapters")
    make = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=128, max_position_embeddings=512)
    make |= dict(vocab_size=VOCAB_SIZE, eos_token_id=VOCAB_SIZE - 1)
    make_model(1, model_type="llama", **make).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    adapters = {
        name: save_adapter(folder / "model", folder / name, seed, size=0.5, **kind)
        for seed, (name, kind) in enumerate(KINDS.items())
    }
    return {"model": folder / "model"} | adapters


def load(folders: dict, dtype: str, quantization: str | None) -> LLM:
    options = dict(dtype=dtype, device="cpu", attention_backend="native", quantization=quantization)
    llm = LLM(folders["model"], enable_lora=True, max_loras=4, max_lora_rank=64, **options)
    assert all(layer.whole is not None and layer.whole.adapters for layer in llm.model.layers)
    return llm


def told(llm: LLM, folders: dict, which: list[int]) -> list[Told]:
    """Tokens and log-probabilities of these of the mixed requests, in one batch."""
    llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": [3 + (at + 5 * i) % 90 for i in range(LENGTHS[at])]} for at in which]
    names = list(KINDS)
    adapters = [
        None if MIXED[at] is None else LoRARequest(MIXED[at], 1 + names.index(MIXED[at]), str(folders[MIXED[at]]))
        for at in which
    ]
    outputs = [one.outputs[0] for one in llm.generate(prompts, SCORED, lora_request=adapters, use_tqdm=False)]
    return [(one.token_ids, [{token: row[token].logprob for token in row} for row in one.logprobs]) for one in outputs]


@pytest.mark.parametrize("dtype, quantization", [("float32", None), ("bfloat16", None), ("float32", "int4")])
def test_a_layer_with_adapters_in_one_call_is_its_parts(dtype, quantization, folders, monkeypatch):
    llm, everything = load(folders, dtype, quantization), list(range(len(MIXED)))
    calls = {"whole": 0, "parts": 0}
    part = native.add_lora_

    def watched(in_one_call):
        def whole(*given):
            calls["whole"] += any(isinstance(one, native.Sequences) and bool(one.token_slots) for one in given)
            return in_one_call(*given)

        return whole

    def parts(*given):
        calls["parts"] += 1
        return part(*given)

    for module, name in ((native, "decoder_layer"), (native_decoder, "logits")):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    monkeypatch.setattr(native, "add_lora_", parts)
    together = told(llm, folders, everything)
    assert calls["whole"] and not calls["parts"]
    for at in everything:
        assert told(llm, folders, [at]) == [together[at]], "a request's numbers depend on its company"
    calls["whole"] = 0
    monkeypatch.setattr(decoder_layer, "WHOLE_LAYERS", False)
    assert told(llm, folders, everything) == together
    assert calls["parts"] and not calls["whole"]
    assert len({str(tokens) for tokens, _ in together}) == len(MIXED)


def test_whole_layers_follow_the_adapters_that_come_and_go(folders):
    """Two places for four adapters: each that leaves takes its ranks along."""
    llm = LLM(
        folders["model"], dtype="float32", device="cpu", attention_backend="native", enable_lora=True, max_loras=2,
        max_lora_rank=64,
    )  # fmt: skip
    few, all_at_once = list(range(len(MIXED))), load(folders, "float32", None)
    assert told(llm, folders, few) == told(all_at_once, folders, few)
    adapters, slots = llm.model.layers[0].whole.adapters.contents, llm.model.lora
    for part in slots.parts.values():
        assert part.native.rank == part.used[0].shape[1] == max(part.users.values(), default=0)
    assert adapters.qkv.count == 3 and adapters.gate_up.count == 2
    assert [adapters.qkv.parts[at].first for at in range(3)] == [0, 64, 96]
