"""Mixtures of experts from checkpoints that transformers writes: logits and tokens are its own; routing, few bits,
adapters, and what is refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import LLM, LoRARequest, SamplingParams
from minillm.kernels import native
from minillm.model import decoder, decoder_layer
from minillm.model.attention import NoCacheAttention
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import CheckpointError, load_config, load_model, read_model
from minillm.model.config import ModelConfig
from minillm.model.errors import AdapterError
from minillm.model.moe_config import SCORES, MoEConfig
from minillm.model.quantize import quantize_decoder
from minillm.model.quantized_folder import save_quantized
from minillm.model.routing import record_routing, route
from minillm.model.weights import weight_files
from minillm.quantization.config import resolve
from tests.helpers.adapters import peft_tokens, save_adapter
from tests.helpers.model_zoo import BASE, EXPERTS, save_checkpoint
from tests.helpers.tiny import save_tiny_llama

PROMPT = [3 + i * 7 % 90 for i in range(33)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Name -> its folder, and the model of transformers."""
    folders = {name: tmp_path_factory.mktemp(name) for name in EXPERTS}
    return {name: (folder, save_checkpoint(folder, name)) for name, folder in folders.items()}


def logits(model, tokens=PROMPT) -> torch.Tensor:
    attention = NoCacheAttention(model.config.layer_windows)
    return model(ForwardBatch.single(tokens, all_logits=True), attention)


@torch.no_grad()
def expected(oracle, tokens=PROMPT) -> torch.Tensor:
    return oracle(torch.tensor([tokens])).logits[0]


def sparse(model) -> list:
    return [model.layers[index].mlp for index in model.config.moe.layers]


@pytest.mark.skipif(native.library() is None, reason="torch's own products make no such promise")
@pytest.mark.parametrize("name", EXPERTS)
def test_a_row_has_the_same_bits_whatever_its_company(name, families):
    model = load_model(families[name][0], "float32", "cpu")
    rows = 3 * torch.randn(65, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    for mlp in sparse(model):
        together = mlp(rows)
        assert [row for row in range(65) if not torch.equal(mlp(rows[row : row + 1])[0], together[row])] == []


@pytest.mark.parametrize("name", EXPERTS)
def test_logits_are_those_of_transformers(name, families):
    folder, oracle = families[name]
    model = load_model(folder, "float32", "cpu")
    torch.testing.assert_close(logits(model), expected(oracle), rtol=1e-4, atol=1e-4)
    for mlp in sparse(model):
        mlp.products.path = "loop"
    torch.testing.assert_close(logits(model), expected(oracle), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", EXPERTS)
def test_parameters_are_counted_as_transformers_counts_them(name, families):
    folder, oracle = families[name]
    config = load_config(folder)
    assert config.num_parameters() == oracle.num_parameters()
    moe = config.moe
    idle = (moe.num_experts - moe.num_experts_per_tok) * 3 * config.hidden_size * moe.intermediate_size
    assert config.num_parameters(moe.num_experts_per_tok) == oracle.num_parameters() - len(moe.layers) * idle


@pytest.mark.parametrize("name", ["mixtral", "dots1"])
def test_shards_and_the_other_layouts_of_experts_give_the_same(name, families, tmp_path):
    """Several files; and the experts of a layer as one tensor, as newer versions of transformers hold them."""
    folder, oracle = families[name]
    same = logits(load_model(folder, "float32", "cpu"))
    save_checkpoint(tmp_path / "shards", name, max_shard_size="40KB")
    assert len(weight_files(tmp_path / "shards")) > 3
    assert torch.equal(logits(load_model(tmp_path / "shards", "float32", "cpu")), same)
    (tmp_path / "fused").mkdir()
    (tmp_path / "fused/config.json").write_text((folder / "config.json").read_text())
    state = {key: value.contiguous() for key, value in oracle.state_dict().items()}
    assert any(value.dim() == 3 for value in state.values())
    save_file(state, tmp_path / "fused/model.safetensors")
    assert torch.equal(logits(load_model(tmp_path / "fused", "float32", "cpu")), same)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("name", ["mixtral-window-tied", "qwen3-moe-sparse-step", "qwen2-moe"])
def test_greedy_text_is_that_of_transformers(name, backend, tmp_path):
    oracle = save_tiny_llama(tmp_path, **EXPERTS[name] | {"num_hidden_layers": 3})
    prompts = [[5 + (i * step) % 250 for i in range(20)] for step in (7, 11)]
    llm = LLM(str(tmp_path), dtype="float32", device="cpu", max_model_len=64, attention_backend=backend)
    answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY, use_tqdm=False)
    for ids, answer in zip(prompts, answers):
        settings = dict(max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
        mask = torch.ones(1, len(ids), dtype=torch.int64)
        generated = oracle.generate(torch.tensor([ids]), attention_mask=mask, **settings)
        assert answer.outputs[0].token_ids == generated[0, len(ids) :].tolist()


# The router


def settings(**changes) -> MoEConfig:
    return MoEConfig(**dict(num_experts=4, num_experts_per_tok=2, intermediate_size=8, layers=(0,)) | changes)


LOGITS = torch.tensor([[1.2, 0.3, 2.0, -0.5]])


def test_weights_of_every_way_to_score():
    p = LOGITS.softmax(-1)[0]
    weights, experts = route(LOGITS, settings())
    assert experts.tolist() == [[2, 0]] and torch.allclose(weights[0], p[[2, 0]])
    weights, _ = route(LOGITS, settings(norm_topk_prob=True, routed_scaling_factor=3.0))
    assert torch.allclose(weights[0], 3 * p[[2, 0]] / p[[2, 0]].sum())
    after, experts = route(LOGITS, settings(scoring_func="softmax_after_topk"))
    assert experts.tolist() == [[2, 0]] and torch.allclose(after[0], p[[2, 0]] / p[[2, 0]].sum())
    weights, _ = route(LOGITS, settings(scoring_func="sigmoid"))
    assert torch.allclose(weights[0], LOGITS[0, [2, 0]].sigmoid())


def test_a_correction_bias_chooses_and_does_not_weigh():
    moe = settings(scoring_func="sigmoid", correction_bias=True)
    weights, experts = route(LOGITS, moe, torch.tensor([0.0, 0.0, -1.0, 5.0]))
    assert experts.tolist() == [[3, 0]] and torch.allclose(weights[0], LOGITS[0, [3, 0]].sigmoid())


def test_experts_come_from_the_best_groups():
    """Group 1 has the single best expert, group 0 the best two together."""
    moe = settings(scoring_func="sigmoid", n_group=2, topk_group=1)
    assert sorted(route(torch.tensor([[1.0, 1.0, 1.5, -5.0]]), moe)[1][0].tolist()) == [0, 1]


@pytest.mark.skipif(native.library() is None, reason="no C compiler with OpenMP here: the twin serves")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scoring", SCORES)
def test_the_native_router_is_its_twin(scoring, dtype, monkeypatch):
    """Also for logits that are equal, where the smaller number comes first, and for all experts."""
    torch.manual_seed(0)
    for num_experts, each, biased in ((5, 2, False), (128, 8, True), (3, 3, True), (1, 1, False)):
        logits, bias = (torch.randn(40, num_experts) * 3).to(dtype), torch.randn(num_experts) if biased else None
        for norm in (False, True):
            moe = settings(num_experts=num_experts, num_experts_per_tok=each, scoring_func=scoring,
                           norm_topk_prob=norm, routed_scaling_factor=1.7)  # fmt: skip
            found = route(logits, moe, bias if scoring == "sigmoid" else None)
            with monkeypatch.context() as patch:
                patch.setattr(native, "serves", lambda x: False)
                weights, experts = route(logits, moe, bias if scoring == "sigmoid" else None)
            torch.testing.assert_close(found[0], weights, rtol=1e-5, atol=1e-6)
            if dtype is torch.float32:  # in bfloat16 many are equal
                assert torch.equal(found[1], experts)
    assert route(torch.zeros(1, 6, dtype=dtype), settings(num_experts=6, scoring_func=scoring))[1].tolist() == [[0, 1]]


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(num_experts_per_tok=5), "num_experts_per_tok=5 is not allowed; allowed: 1 to the 4 experts"),
        (dict(scoring_func="relu"), "scoring_func='relu' is not supported; supported: softmax"),
        (
            dict(n_group=2, scoring_func="softmax_after_topk"),
            "n_group=2 with scoring_func='softmax_after_topk' is not supported",
        ),
        (dict(n_group=3, scoring_func="sigmoid"), "n_group=3 does not divide 4 experts"),
        (dict(n_group=2, topk_group=3, scoring_func="sigmoid"), "topk_group=3 is not allowed; allowed: up to n_group"),
    ],
)
def test_settings_that_do_not_fit_are_named(changes, said):
    with pytest.raises(ValueError, match=said):
        settings(**changes)


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(num_experts=True), "num_experts=True is not allowed"),
        (dict(mlp_only_layers=3), "mlp_only_layers=3 is not allowed; allowed: a list of layers"),
        (dict(norm_topk_prob="yes"), "norm_topk_prob='yes' is not allowed"),
        (dict(model_type="olmoe", clip_qkv=3.0), "clip_qkv=3.0 is not supported; supported: null"),
    ],
)
def test_fields_that_no_model_has_are_named(changes, said):
    with pytest.raises(ValueError, match=said):
        ModelConfig.from_hf(BASE | EXPERTS["qwen3-moe"] | changes)


def test_an_expert_that_is_missing_is_named(families, tmp_path):
    folder, _ = families["qwen3-moe"]
    tensors = load_file(folder / "model.safetensors")
    lost = next(name for name in tensors if "layers.1.mlp.experts" in name)
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.mlp\.experts"):
        load_model(tmp_path, "float32", "cpu")


# In the engine


def test_experts_touched_are_recorded_and_counted_in_the_trace(tmp_path):
    save_tiny_llama(tmp_path, **EXPERTS["qwen3-moe-sparse-step"])
    llm = LLM(str(tmp_path), dtype="float32", device="cpu", max_model_len=64)
    llm.trace.enabled = True
    with record_routing(llm.model) as recorder:
        llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert set(recorder.chosen) == {3}, "only the last layer has experts"
    touched, counts = recorder.touched(3), recorder.counts(3, 4)
    assert len(touched) == 2 and touched[1] == 2, "one token reads two experts"
    assert counts.sum() == 2 * (len(PROMPT) + 1)
    assert list(llm.trace.totals("experts touched").values()) == touched
    with pytest.raises(ValueError, match="model_type='llama' has no experts"), record_routing(LLM("tinyworld").model):
        pass


def test_a_request_has_the_same_tokens_whatever_shares_its_batch(tmp_path):
    save_tiny_llama(tmp_path, **EXPERTS["mixtral"])
    llm = LLM(str(tmp_path), dtype="float32", device="cpu", max_model_len=96, max_num_batched_tokens=40)
    prompts = [{"prompt_token_ids": [(3 + i * step) % 97 for i in range(length)]} for step, length in
               ((7, 33), (5, 1), (11, 60), (13, 17), (17, 2))]  # fmt: skip
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=12, ignore_eos=True, logprobs=2)
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, beside in zip(prompts, together):
        [alone] = llm.generate([prompt], params, use_tqdm=False)
        assert alone.outputs[0].token_ids == beside.outputs[0].token_ids
        for a, b in zip(alone.outputs[0].logprobs, beside.outputs[0].logprobs):
            assert {key: one.logprob for key, one in a.items()} == {key: one.logprob for key, one in b.items()}


# In few bits


@pytest.mark.parametrize("format", ["int8", "int4", "fp8", "fp4", {"weights": "int8", "group_size": None,
                                    "activations": "int8"}, {"weights": "int4", "group_size": 8, "symmetric": False}],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["qwen3-moe", "dots1"])
def test_few_bits_mean_what_they_dequantize_to(format, name, families, tmp_path):
    """The router stays as it is; a folder of ours is read as it was written; native and expert by expert."""
    folder, _ = families[name]
    if isinstance(format, str):
        format = {"name": format, "group_size": 8 if format.endswith("4") else None}
    config = resolve(format)
    model = read_model(folder, "float32", "cpu", config)
    routers = [mlp.gate.weight.clone() for mlp in sparse(model)]
    save_quantized(model, config, folder, tmp_path / "written")
    again = logits(load_model(tmp_path / "written", "float32", "cpu"))
    plain = read_model(folder, "float32", "cpu")
    for ours, theirs in zip(plain.linears().values(), model.linears().values()):
        if theirs.quantized is not None and ours.plain is not plain.embed_tokens:
            ours.plain.copy_(theirs.quantized.dequantize())
    found = logits(model.prepare())
    assert torch.equal(again, found)
    for mlp, router in zip(sparse(model), routers):
        assert mlp.gate.quantized is None and torch.equal(mlp.gate.weight, router)
    if config.activations is None:
        torch.testing.assert_close(found, logits(plain.prepare()), rtol=1e-4, atol=1e-4)
    for mlp in sparse(model):
        mlp.products.path = "loop"
    torch.testing.assert_close(logits(model), found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "asked",
    ["gptq", "awq", "smoothquant", "llm_int8", {"name": "smoothquant", "method": "rtn", "activation_scales": "static"}],
    ids=str,
)  # fmt: skip
def test_methods_that_look_at_data_are_refused_by_name(asked, families):
    model, config = read_model(families["mixtral"][0], "float32", "cpu"), resolve(asked)
    with pytest.raises(ValueError, match=f"method='{config.method}' .* is calibrated, and a text reaches only some"):
        quantize_decoder(model, config, [PROMPT * 20])


# Beside other features


def test_an_adapter_of_attention_is_served_and_one_of_experts_refused(tmp_path):
    save_tiny_llama(tmp_path / "model", **EXPERTS["qwen3-moe"])
    attention = save_adapter(tmp_path / "model", tmp_path / "attention", 1, targets=["q_proj", "o_proj"])
    llm = LLM(str(tmp_path / "model"), dtype="float32", device="cpu", enable_lora=True, max_model_len=64)
    [answer] = llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, use_tqdm=False,
                            lora_request=LoRARequest("a", 1, str(attention)))  # fmt: skip
    assert [answer.outputs[0].token_ids] == peft_tokens(tmp_path / "model", attention, [PROMPT], 10)
    other = tmp_path / "experts"
    other.mkdir()
    settings = json.loads((attention / "adapter_config.json").read_text()) | {"target_modules": ["gate_proj"]}
    (other / "adapter_config.json").write_text(json.dumps(settings))
    place = "base_model.model.model.layers.0.mlp.experts.1.gate_proj"
    pair = {f"{place}.lora_A.weight": torch.ones(4, 48), f"{place}.lora_B.weight": torch.ones(20, 4)}
    save_file(pair, other / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"layers.0.mlp.experts.1.gate_proj: adapters of experts .* are not served"):
        llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, lora_request=LoRARequest("b", 2, str(other)))


def test_layers_with_experts_are_not_streamed(families):
    with pytest.raises(ValueError, match=r"cpu_offload_bytes=1000000 streams layers that are all alike"):
        load_model(families["mixtral"][0], "float32", "cpu", cpu_offload_bytes=10**6)


@pytest.mark.skipif(native.library() is None, reason="whole layers are for the CPU's kernels")
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe-sparse-step"])
def test_a_layer_with_experts_in_one_call_is_its_parts(family, quantization, tmp_path, monkeypatch):
    monkeypatch.setattr(decoder, "CACHE_BYTES", 0)  # so that small matrices are packed, as large ones are
    save_tiny_llama(tmp_path, **EXPERTS[family])
    options = dict(dtype="float32", device="cpu", attention_backend="native", quantization=quantization)
    llm = LLM(str(tmp_path), num_kv_blocks=64, **options)
    layers = llm.model.layers
    if family == "mixtral":  # a bias that balances the load, which mixtures without a shared expert have nowhere yet
        for layer in layers:
            layer.mlp.correction_bias = torch.randn(5)
            layer.prepare(llm.model.config)
    assert all(layer.whole is not None for layer in layers)
    assert [layer.index for layer in layers if layer.mixture is not None] == list(llm.model.config.moe.layers)
    prompts = [
        {"prompt_token_ids": [3 + (i * step) % 90 for i in range(length)]} for step, length in ((7, 100), (5, 9))
    ]

    def told() -> tuple[list, list]:
        llm.reset_prefix_cache()
        with record_routing(llm.model) as recorder:
            outs = llm.generate(prompts, GREEDY, use_tqdm=False)
        chosen = {layer: torch.cat(experts).tolist() for layer, experts in recorder.chosen.items()}
        return [out.outputs[0].token_ids for out in outs], chosen

    tokens, chosen = told()
    monkeypatch.setattr(decoder_layer, "WHOLE_LAYERS", False)
    assert told() == (tokens, chosen)


@pytest.mark.skipif(native.library() is None, reason="whole layers are for the CPU's kernels")
@pytest.mark.parametrize("family", ["qwen2-moe", "dots1", "olmoe"])
def test_layers_with_shared_experts_or_another_norm_run_in_parts(family, families, monkeypatch):
    monkeypatch.setattr(decoder, "CACHE_BYTES", 0)
    model = load_model(families[family][0], "float32", "cpu")
    assert all(model.layers[index].whole is None for index in model.config.moe.layers)
