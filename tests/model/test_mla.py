"""Multi-head latent attention from checkpoints that transformers writes: logits and tokens are its own, whatever shares
the step; latents in pages; few bits, adapters, embeddings; and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import LLM, LoRARequest, SamplingParams
from minillm.engine.parts import build_attention, build_cache
from minillm.engine.pooling import hidden_states
from minillm.engine.sizing import block_bytes_of
from minillm.kv_cache.latent import LatentAttention, LatentKVCache, latent_attention
from minillm.kv_cache.manager import KVCacheManager
from minillm.kv_cache.triton_latent import TritonLatentAttention
from minillm.model.attention import NoCacheAttention
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import CheckpointError, load_config, load_model, read_model
from minillm.model.config import ModelConfig
from minillm.model.errors import AdapterError
from minillm.model.quantize import quantize_decoder
from minillm.model.quantized_folder import save_quantized
from minillm.quantization.config import resolve
from tests.helpers.adapters import peft_tokens, save_adapter
from tests.helpers.kernel_cases import device, needs_triton
from tests.helpers.model_zoo import BASE, LATENT, MSCALE, save_checkpoint
from tests.helpers.tiny import save_tiny_llama

PROMPT = [3 + i * 7 % 90 for i in range(33)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
GROUPS = "deepseek-v2-groups"
Families = dict[str, tuple[Path, torch.nn.Module]]


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> Families:
    """Name -> its folder, and the model of transformers."""
    folders = {name: tmp_path_factory.mktemp(name) for name in LATENT}
    return {name: (folder, save_checkpoint(folder, name)) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A folder with a tokenizer, and the model of transformers."""
    folder = tmp_path_factory.mktemp("served")
    return folder, save_tiny_llama(folder, **LATENT[GROUPS])


def logits(model, tokens=PROMPT) -> torch.Tensor:
    return model(ForwardBatch.single(tokens, all_logits=True), NoCacheAttention(model.config.layer_windows))


def paged_logits(model, cuts: list[int], kv_cache_dtype: str = "auto") -> torch.Tensor:
    """Through scattered blocks of 4, the prompt in pieces that begin at `cuts`."""
    attention = build_attention(model, build_cache(model, KVCacheManager(12, 4), kv_cache_dtype))
    found = []
    for start, end in zip(cuts, [*cuts[1:], len(PROMPT)]):
        batch = ForwardBatch.single(PROMPT[start:end], start, all_logits=True)
        batch.block_table = torch.tensor([[7, 2, 11, 4, 5, 9, 1, 3, 10]])
        batch.slot_mapping = batch.block_table[0][batch.positions // 4] * 4 + batch.positions % 4
        found.append(model(batch, attention))
    return torch.cat(found)


@torch.no_grad()
def expected(oracle, tokens=PROMPT) -> torch.Tensor:
    return oracle(torch.tensor([tokens])).logits[0]


def generated(oracle, ids: list[int], count: int = 10) -> list[int]:
    options = dict(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    mask = torch.ones(1, len(ids), dtype=torch.int64)
    return oracle.generate(torch.tensor([ids]), attention_mask=mask, **options)[0, len(ids) :].tolist()


@pytest.mark.parametrize("name", LATENT)
def test_logits_are_those_of_transformers(name, families):
    """Without a cache; and over pages: whole, in chunks, and token by token at the end."""
    folder, oracle = families[name]
    model = load_model(folder, "float32", "cpu")
    torch.testing.assert_close(logits(model), expected(oracle), rtol=1e-4, atol=1e-4)
    for cuts in ([0], [0, 9, 20], [0, 30, 31, 32]):
        torch.testing.assert_close(paged_logits(model, cuts), expected(oracle), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LATENT)
def test_parameters_are_counted_as_transformers_counts_them(name, families):
    folder, oracle = families[name]
    assert load_config(folder).num_parameters() == oracle.num_parameters()


def test_the_scale_of_the_scores_and_the_norms_of_latents_are_their_own(families):
    """YaRN multiplies the scores by mscale squared, and the norms' epsilon is not the model's."""
    config = load_config(families["deepseek-v3"][0])
    assert config.rope.score_factor == pytest.approx((0.1 * 0.9 * torch.tensor(4.0).log().item() + 1) ** 2)
    assert config.rms_norm_eps == 1e-5
    assert load_model(families["deepseek-v3"][0], "float32", "cpu").layers[0].self_attn.kv_a_layernorm.eps == 1e-6


def test_the_hubs_spelling_of_a_configuration_is_read(families, tmp_path):
    """rope_scaling beside rope_theta, and the fields that DeepSeek's own files have."""
    folder, oracle = families["deepseek-v3"]
    raw = json.loads((folder / "config.json").read_text())
    parameters = raw.pop("rope_parameters")
    raw |= {
        "rope_theta": parameters.pop("rope_theta"),
        "rope_scaling": {"type": parameters.pop("rope_type")} | parameters,
    }
    raw |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 1}
    for name in ("head_dim", "rope_interleave", "num_mtp_layers"):
        raw.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(48, 96)  # of the layer that drafts
    save_file(tensors, tmp_path / "model.safetensors")
    torch.testing.assert_close(logits(load_model(tmp_path, "float32", "cpu")), expected(oracle), rtol=1e-4, atol=1e-4)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 0}))
    with pytest.raises(CheckpointError, match=r"surplus: model\.layers\.3\.eh_proj\.weight"):
        load_model(tmp_path, "float32", "cpu")


# Latents in pages


def test_a_token_leaves_one_latent_in_each_layer(families):
    model = load_model(families["deepseek-v2"][0], "float32", "cpu")
    cache = build_cache(model, KVCacheManager(12, 4))
    assert isinstance(cache, LatentKVCache)
    assert [part.shape for part in cache.parts["keys"]] == [(13, 4, 24 + 8)] * 3
    assert model.config.kv_bytes_per_token(torch.float32) == 3 * (24 + 8) * 4
    assert cache.bytes_per_block == block_bytes_of(model, 4) == 4 * model.config.kv_bytes_per_token(torch.float32)
    assert block_bytes_of(model, 4, "int8") == 3 * 4 * (24 + 8 + 4)
    with pytest.raises(ValueError, match="num_kv_heads=2 of latents is not allowed"):
        LatentKVCache(1, 2, 32, 3, 4, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_absorbed_attention_is_attention_over_the_expanded_heads(dtype):
    """Against keys and values of every head in float64; what may not be seen is NaN in no result."""
    torch.manual_seed(0)
    heads, rank, rope, plain, value = 4, 24, 8, 12, 16
    k_up, v_up = torch.randn(heads, plain, rank) / rank**0.5, torch.randn(heads, value, rank) / rank**0.5
    q, latents = torch.randn(2, 3, heads, plain + rope), torch.randn(2, 10, rank + rope)
    seen = torch.rand(2, 1, 3, 10) < 0.6
    seen[..., 0] = True
    absorbed = torch.cat([torch.einsum("sqhd,hdr->sqhr", q[..., :plain], k_up), q[..., plain:]], -1)
    scale = ((rank + rope) / (plain + rope)) ** 0.5
    found = latent_attention((absorbed * scale).to(dtype), latents.to(dtype), seen, rank)
    out = torch.einsum("sqhr,hvr->sqhv", found.double(), v_up.double())

    c = latents[..., :rank].double()
    keys = torch.cat([torch.einsum("spr,hdr->sphd", c, k_up.double()),
                      latents[:, :, None, rank:].double().expand(-1, -1, heads, -1)], -1)  # fmt: skip
    values = torch.einsum("spr,hvr->sphv", c, v_up.double())
    scores = torch.einsum("sqhd,sphd->sqhp", q.double(), keys) / (plain + rope) ** 0.5
    weights = scores.masked_fill(~seen.transpose(1, 2), -torch.inf).softmax(-1)
    right = torch.einsum("sqhp,sphv->sqhv", weights, values)
    torch.testing.assert_close(out, right, rtol=0, atol=1e-5 if dtype is torch.float32 else 0.06)


@pytest.mark.parametrize("kind, most", [("int8", 0.05), ("fp8", 0.3), ("int4", 0.5)])
def test_latents_in_few_bits_stay_near(kind, most, families):
    model = load_model(families["deepseek-v2"][0], "float32", "cpu")
    found, plain = paged_logits(model, [0, 9, 32], kind), paged_logits(model, [0])
    assert 0 < (found - plain).norm() < most * plain.norm()


def test_hidden_states_are_those_of_transformers(families):
    folder, oracle = families["deepseek-v3"]
    with torch.no_grad():
        wanted = oracle.model(torch.tensor([PROMPT])).last_hidden_state[0]
    found = hidden_states(load_model(folder, "float32", "cpu"), PROMPT)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


# In the engine

SETTINGS = {
    "plain": {},
    "chunks of 5": dict(max_num_batched_tokens=5),
    "few blocks": dict(num_kv_blocks=22, block_size=4, max_num_batched_tokens=16),
    "few blocks, swap": dict(num_kv_blocks=22, block_size=4, preemption_mode="swap", host_kv_bytes=10**6),
    "one at a time": dict(max_num_seqs=1, enable_prefix_caching=False),
    "n-grams": dict(speculative_config={"method": "ngram", "num_speculative_tokens": 3}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_tokens_are_those_of_transformers(name, served):
    """Prompts with a common beginning, so that the prefix cache serves too."""
    folder, oracle = served
    head = [5 + i * 3 % 250 for i in range(16)]
    prompts = [head + [5 + (i * step) % 250 for i in range(length)] for step, length in ((7, 20), (11, 3), (13, 24))]
    with LLM(folder, dtype="float32", device="cpu", max_model_len=64, **SETTINGS[name]) as llm:
        for _ in range(2):  # the second time over a warm prefix cache
            answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY, use_tqdm=False)
            found = [answer.outputs[0].token_ids for answer in answers]
            assert found == [generated(oracle, ids) for ids in prompts]
        assert isinstance(llm.engine.runner.attention, LatentAttention)


@needs_triton
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_triton_decodes_over_latents(kv_cache_dtype, served):
    """Beside a prompt in the same step, and token by token; codes are those that torch reads."""
    folder, oracle = served
    prompts = [[5 + (i * step) % 250 for i in range(length)] for step, length in ((7, 20), (11, 3))]
    settings = dict(dtype="float32", device=device(), max_model_len=64, max_num_batched_tokens=12)
    found = []
    for backend in ("triton", "torch"):
        with LLM(folder, **settings, kv_cache_dtype=kv_cache_dtype, attention_backend=backend) as llm:
            assert isinstance(llm.engine.runner.attention, TritonLatentAttention) == (backend == "triton")
            answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY, use_tqdm=False)
            found.append([answer.outputs[0].token_ids for answer in answers])
    assert found[0] == found[1]
    if kv_cache_dtype == "auto":
        assert found[0] == [generated(oracle, ids) for ids in prompts]


def test_an_adapter_is_served_and_one_of_the_absorbed_matrix_refused(served, tmp_path):
    folder, _ = served
    targets = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
    adapter = save_adapter(folder, tmp_path / "good", 1, targets=targets, size=0.5)
    with LLM(folder, dtype="float32", device="cpu", enable_lora=True, max_model_len=64) as llm:
        [answer] = llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, use_tqdm=False,
                                lora_request=LoRARequest("a", 1, str(adapter)))  # fmt: skip
        assert [answer.outputs[0].token_ids] == peft_tokens(folder, adapter, [PROMPT], 10)
        other = save_adapter(folder, tmp_path / "absorbed", 2, targets=["kv_b_proj"])
        with pytest.raises(AdapterError, match="an adapter of kv_b_proj is not served, since decoding absorbs it"):
            llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, lora_request=LoRARequest("b", 2, str(other)))


def test_layers_without_experts_are_streamed(families):
    folder, oracle = families["deepseek-v3-dense-halves"]
    model = load_model(folder, "float32", "cpu", cpu_offload_bytes=10**6)
    torch.testing.assert_close(logits(model), expected(oracle), rtol=1e-4, atol=1e-4)


# In few bits


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_few_bits_mean_what_they_dequantize_to(name, families, tmp_path):
    """The absorbed matrix stays as it is; a folder of ours is read as it was written."""
    folder, _ = families[name]
    config = resolve({"weights": "int8", "group_size": None})
    model = read_model(folder, "float32", "cpu", config)
    save_quantized(model, config, folder, tmp_path / "written")
    plain = read_model(folder, "float32", "cpu")
    assert torch.equal(model.layers[0].self_attn.kv_b_proj, plain.layers[0].self_attn.kv_b_proj)
    for ours, theirs in zip(plain.linears().values(), model.linears().values()):
        if theirs.quantized is not None:
            ours.plain.copy_(theirs.quantized.dequantize())
    found = logits(model.prepare())
    assert torch.equal(logits(load_model(tmp_path / "written", "float32", "cpu")), found)
    torch.testing.assert_close(found, logits(plain.prepare()), rtol=1e-4, atol=1e-4)


def test_gptq_serves_and_methods_that_fold_into_norms_are_refused(families):
    folder, oracle = families["deepseek-v3-dense-halves"]
    texts = [[3 + (i * step) % 90 for i in range(60)] for step in (7, 11, 13)]
    asked = {"name": "gptq", "weights": "int8", "group_size": 8, "lm_head": None}
    model = read_model(folder, "float32", "cpu")
    quantize_decoder(model, resolve(asked), texts)
    found = logits(model.prepare())
    assert (found - expected(oracle)).norm() < 0.1 * expected(oracle).norm()
    for method in ("awq", "smoothquant"):
        with pytest.raises(ValueError, match=f"method='{method}' folds .* go through latents; use rtn or gptq"):
            quantize_decoder(read_model(folder, "float32", "cpu"), resolve(method), texts)


# What is refused


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(qk_rope_head_dim=7), "qk_rope_head_dim=7 is odd"),
        (dict(kv_lora_rank="512"), "kv_lora_rank='512' is not allowed; allowed: a whole number"),
        (dict(q_lora_rank=0), "q_lora_rank=0 is not allowed"),
        (dict(topk_method="noaux_tc"), "topk_method='noaux_tc' is not supported with model_type='deepseek_v2'"),
        (dict(norm_topk_prob=True), "norm_topk_prob=True is not supported with model_type='deepseek_v2'"),
        (dict(moe_layer_freq=2), "moe_layer_freq=2 is not supported"),
        (dict(scoring_func="sigmoid"), "scoring_func='sigmoid' is not supported"),
        (dict(topk_group=3), "topk_group=3 is not allowed; allowed: up to n_group=2"),
    ],
)
def test_fields_that_do_not_fit_are_named(changes, said):
    groups = dict(topk_method="group_limited_greedy", n_group=2, topk_group=1)
    with pytest.raises(ValueError, match=said):
        ModelConfig.from_hf(BASE | LATENT["deepseek-v2"] | groups | changes)


@pytest.mark.parametrize(
    "settings, said",
    [
        (dict(attention_backend="triton", kv_cache_dtype="int4"), "'triton' has no kernels for latents in pages of"),
        (dict(attention_backend="native", kv_cache_dtype="fp8"), "'native' has no kernels for latents in pages of"),
        (dict(kv_retention={"sinks": 2, "window": 8}), "kv_retention=.* keeps latents; leave it out"),
    ],
)
def test_settings_that_latents_do_not_have_are_refused_by_name(settings, said, served):
    with pytest.raises((ValueError, NotImplementedError), match=said):
        LLM(served[0], dtype="float32", device="cpu", max_model_len=64, **settings)


def test_settings_of_the_score_factor_that_disagree_are_named():
    raw = BASE | LATENT["deepseek-v3"] | {"rope_scaling": MSCALE | {"mscale_all_dim": 0.8}}
    with pytest.raises(ValueError, match=r"rope_scaling and rope_parameters disagree: .*score_factor"):
        ModelConfig.from_hf(raw)
