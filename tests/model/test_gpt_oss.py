"""gpt-oss: learned sink logits, every second layer with a window, biases, clamped experts. Logits and tokens are those
of transformers on random weights, however the engine serves them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import LLM, SamplingParams
from minillm.engine.parts import build_attention
from minillm.kernels import native
from minillm.kernels.language import MODE
from minillm.kv_cache.native_attention import NativeAttention
from minillm.kv_cache.sink_logits import with_sink_logits
from minillm.kv_cache.triton_attention import TritonAttention
from minillm.model.attention import NoCacheAttention, sink_logits_of
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import load_config, load_model
from minillm.model.config import ModelConfig
from minillm.model.errors import CheckpointError
from tests.helpers.model_zoo import BASE, make_model
from tests.helpers.tiny import VOCAB_SIZE, byte_tokenizer
from tests.model.test_families import batch_of, pages

SETTINGS = dict(
    model_type="gpt_oss", vocab_size=VOCAB_SIZE, num_hidden_layers=4, head_dim=16, num_local_experts=5,
    num_experts_per_tok=2, sliding_window=6, attention_bias=True,
    rope_parameters={"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                     "truncate": False, "original_max_position_embeddings": 64},
    max_position_embeddings=256, eos_token_id=VOCAB_SIZE - 1,
)  # fmt: skip
PROMPT = [3 + i * 7 % 90 for i in range(33)]
PROMPTS = [[*PROMPT, 50, 60], PROMPT, [5], PROMPT[:16] + [9] * 5, [7, 8, 9] * 6]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
interpreted = pytest.mark.skipif(MODE != "interpreted", reason="the kernels are interpreted, on a CPU")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """A folder as transformers writes it, its model, and what that says to each prompt."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    model = make_model(seed=3, **SETTINGS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name or "router" in name:
                parameter.normal_(std=0.5)  # wide enough that a gate reaches its limit now and then
            elif name.endswith("sinks"):
                parameter.normal_(std=2.0)
    model.config._attn_implementation = "eager"
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    said = [
        model.generate(torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False)[0, len(prompt) :]
        for prompt in PROMPTS
    ]
    return folder, model, [tokens.tolist() for tokens in said]


@torch.no_grad()
def expected(model, tokens=PROMPT):
    return model(torch.tensor([tokens])).logits[0]


IN_TRITON = [pytest.param(name, marks=interpreted) for name in ("triton", "triton, prompts in torch")]


@pytest.mark.parametrize("backend", ["torch", "auto", "none", *IN_TRITON])
def test_logits_are_those_of_transformers(backend, oracle):
    folder, theirs, _ = oracle
    model = load_model(folder, "float32", "cpu")
    if backend == "none":
        found = model(ForwardBatch.single(PROMPT, all_logits=True), NoCacheAttention.of(model))
    else:
        if backend == "triton, prompts in torch":  # as on a T4
            windows, heads = model.config.layer_windows, model.config.num_heads
            attention = TritonAttention(pages(model), windows, heads, torch_prefill=True)
            attention.fused_store = False
            with_sink_logits(attention, sink_logits_of(model))
        else:
            attention = build_attention(model, pages(model), backend)
        pieces = [(0, 20), (20, 32), (32, 33)]
        found = torch.cat([model(batch_of(PROMPT[a:b], a), attention) for a, b in pieces])
    torch.testing.assert_close(found, expected(theirs), rtol=1e-4, atol=1e-3)


def test_every_part_of_it_matters(oracle):
    """What the equality above would not see if it were small: sinks, clamps, the windows of every second layer."""
    folder, theirs, _ = oracle
    model, right = load_model(folder, "float32", "cpu"), expected(theirs)
    assert model.config.layer_windows == (6, None, 6, None) and model.config.sink_logits
    kept = [layer.self_attn.sinks.clone() for layer in theirs.model.layers]
    with torch.no_grad():
        for layer in theirs.model.layers:
            layer.self_attn.sinks.fill_(-1e9)
        assert (expected(theirs) - right).abs().max() > 0.1
        for layer, sinks in zip(theirs.model.layers, kept):
            layer.self_attn.sinks.copy_(sinks)
    for layer in theirs.model.layers:
        layer.mlp.experts.limit = 1e9
    unclamped = expected(theirs)
    for layer in theirs.model.layers:
        layer.mlp.experts.limit = 7.0
    assert (unclamped - right).abs().max() > 1e-2


WAYS = {
    "together": {},
    "chunks, blocks of 7": dict(max_num_batched_tokens=5, block_size=7),
    "few blocks, swapped": dict(num_kv_blocks=14, block_size=4, max_num_batched_tokens=16, preemption_mode="swap",
                                host_kv_bytes=10**6),
    "prefixes and tiers": dict(enable_prefix_caching=True, host_kv_bytes=10**6, num_kv_blocks=16, block_size=4),
    "speculation": dict(speculative_config={"method": "ngram", "num_speculative_tokens": 3}),
    "async": dict(async_scheduling=True, max_num_seqs=2),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_tokens_are_those_of_transformers_in_every_way(way, backend, oracle):
    folder, _, said = oracle
    llm = LLM(str(folder), dtype="float32", device="cpu", attention_backend=backend, **WAYS[way])
    for _ in range(2):
        outs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
        assert [out.outputs[0].token_ids for out in outs] == said
    llm.engine.scheduler.check_integrity()


@interpreted
@pytest.mark.parametrize("kind", ["auto", "int4"])
def test_tokens_in_triton_are_those_of_the_other_backends(kind, oracle):
    folder, _, said = oracle
    prompts, most = [{"prompt_token_ids": prompt} for prompt in PROMPTS[1:3]], 4
    settings = dict(dtype="float32", device="cpu", kv_cache_dtype=kind, max_num_batched_tokens=20, block_size=7)
    params, found = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True), []
    for backend in ("triton", "torch"):
        llm = LLM(str(folder), attention_backend=backend, **settings)
        found.append([out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1] and (kind != "auto" or found[0] == [tokens[:most] for tokens in said[1:3]])


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_both_backends_say_the_same_over_pages_of_codes(kind, oracle):
    folder, said = oracle[0], []
    for backend in ("torch", "auto"):
        llm = LLM(str(folder), dtype="float32", device="cpu", attention_backend=backend, kv_cache_dtype=kind)
        outs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
        said.append([out.outputs[0].token_ids for out in outs])
    assert said[0] == said[1]


def test_the_shape_is_counted_and_read_without_layer_types(oracle):
    folder, theirs, _ = oracle
    config = load_config(folder)
    assert config.num_parameters() == sum(parameter.numel() for parameter in theirs.parameters())
    hub = BASE | SETTINGS | {"layer_types": None}
    assert ModelConfig.from_hf(hub).layer_windows == (6, None, 6, None)


def test_what_is_not_computed_is_refused_by_name(oracle, tmp_path):
    folder, _, _ = oracle
    with pytest.raises(ValueError, match=r"swiglu_limit=5.0 is not supported; supported: 7.0"):
        ModelConfig.from_hf(BASE | SETTINGS | {"swiglu_limit": 5.0})
    model = load_model(folder, "float32", "cpu")
    backends = [NoCacheAttention(model.config.layer_windows)]
    if native.library() is not None:
        backends.append(NativeAttention(pages(model), model.config.layer_windows))
    for backend in backends:
        with pytest.raises(ValueError, match="one of them has learned sink logits, the other has none"):
            model(batch_of(PROMPT, 0), backend)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name][:3].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="gate_up_proj"):
        load_model(tmp_path, "float32", "cpu")
