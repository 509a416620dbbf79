"""The hub's EAGLE-3 heads: drafts are those of a plain implementation, they change no token, and what is not read is
refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minillm import LLM, SamplingParams
from minillm.engine import eagle
from minillm.model.checkpoint import load_config
from minillm.model.errors import CheckpointError
from minillm.speculative.config import SpeculativeConfig
from minillm.speculative.eagle3_config import LAYER_IDS, Eagle3Config
from minillm.speculative.eagle3_head import ABSENT
from minillm.speculative.eagle_config import resolve_head
from tests.helpers import eagle3_writer
from tests.helpers.kernel_cases import needs_triton
from tests.helpers.speculating import PROMPTS, say, tokens
from tests.helpers.tiny import VOCAB_SIZE, save_tiny_llama

LAYERS = 8  # of the target: the head reads what stands behind 2, 4 and 5 of them
HEADS = {  # changes of the head's config.json
    "narrow": {},
    "as wide as the target": dict(hidden_size=48, target_hidden_size=None, head_dim=16),
    "whole vocabulary": dict(draft_vocab_size=None, rope_scaling=None),
    "norm before the residual": dict(norm_before_residual=True, head_dim=12),
    "other states": dict(eagle_config={LAYER_IDS: [1, 3, 8]}),
    "two states": dict(eagle_aux_hidden_state_layer_ids=[2, 7], num_aux_hidden_states=2),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("eagle3")
    save_tiny_llama(path / "target", num_hidden_layers=LAYERS)
    save_tiny_llama(path / "shallow", num_hidden_layers=4)
    save_tiny_llama(path / "triton", num_hidden_layers=LAYERS, head_dim=16)
    for name, changed in HEADS.items():
        eagle3_writer.write(path / name, seed=len(name), **changed)
    return path


def make(folder, head="narrow", target="target", method="eagle", **settings) -> LLM:
    spec = {"method": method, "model": folder / head, "num_speculative_tokens": 3}
    return LLM(folder / target, device="cpu", dtype="float32", speculative_config=spec, **settings)


def plain(folder, target="target", **settings) -> LLM:
    return LLM(folder / target, device="cpu", dtype="float32", **settings)


def reference(folder, head, theirs):
    """The head, computed plainly, and the hidden states that it reads of a text: transformers' own."""
    config = json.loads((folder / head / "config.json").read_text())
    tensors = load_file(folder / head / "model.safetensors")
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    shape = AutoConfig.for_model(**config | {"head_dim": dim, "architectures": None})
    kind = shape.rope_parameters["rope_type"]
    frequencies = 1 / config["rope_theta"] ** (torch.arange(0, dim, 2) / dim)
    if kind != "default":
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](shape, torch.device("cpu"))
    embedding = tensors.get("embed_tokens.weight", theirs.get_input_embeddings().weight.detach())
    layers = config.get("eagle_config", config).get(LAYER_IDS, [2, LAYERS // 2, LAYERS - 3])

    @torch.no_grad()
    def states(text):
        found = theirs(torch.tensor([text]), output_hidden_states=True).hidden_states
        return torch.cat([found[layer][0] if layer < LAYERS else last_state(theirs, text) for layer in layers], dim=-1)

    return eagle3_writer.PlainHead(config, tensors, embedding, frequencies), states


@torch.no_grad()
def last_state(theirs, text):
    """Behind the last layer and before the last norm, which transformers applies to the last of its hidden states."""
    kept = []
    handle = theirs.model.layers[-1].register_forward_hook(lambda layer, inputs, out: kept.append(out))
    theirs(torch.tensor([text]))
    handle.remove()
    return (kept[0][0] if isinstance(kept[0], tuple) else kept[0]).reshape(len(text), -1)


@pytest.mark.parametrize("head", HEADS)
def test_every_draft_is_that_of_the_plain_head(head, folder):
    """Of the first pass and of the further ones, behind a text of which some tokens were drafted and accepted."""
    theirs = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    compute, states = reference(folder, head, theirs)
    llm = make(folder, head, block_size=5, enable_prefix_caching=False)
    drafter, seen = llm.engine.runner.drafter, []
    propose, forward = drafter.propose, drafter.forward
    rows_logits = []
    drafter.forward = lambda rows, ids: rows_logits.append(forward(rows, ids)) or rows_logits[-1]

    def recorded(requests, counts):
        rows_logits.clear()
        drafts = propose(requests, counts)
        seen.append((list(requests[0].token_ids), drafts[0].token_ids, [logits[0].clone() for logits in rows_logits]))
        return drafts

    drafter.propose = recorded
    say(llm, GREEDY, [[5, 6, 7, 8, 9, 10, 11]])
    assert len(seen) > 3
    for text, drafted, logits in seen:
        if not drafted:
            continue
        right, right_logits = compute(text, states(text)[:-1], len(drafted))
        assert drafted == right
        ids = torch.arange(VOCAB_SIZE)
        if "d2t" in compute.tensors:
            ids = torch.arange(70) + compute.tensors["d2t"]
        for found, wanted in zip(logits, right_logits):
            torch.testing.assert_close(found[ids], wanted, atol=2e-4, rtol=1e-3)
            absent = torch.ones(VOCAB_SIZE, dtype=torch.bool).index_fill(0, ids, False)
            assert (found[absent] == ABSENT).all()


WAYS = {
    "together": {},
    "blocks of 4, few": dict(num_kv_blocks=9, block_size=4),
    "chunks": dict(max_num_batched_tokens=5),
    "swapped": dict(num_kv_blocks=9, block_size=4, preemption_mode="swap", host_kv_bytes=10**6),
    "codes in the cache": dict(enable_prefix_caching=False, kv_cache_dtype="int8"),
    "async": dict(attention_backend="torch", async_scheduling=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("head", ["narrow", "as wide as the target"])
def test_drafts_change_no_token(head, way, folder):
    """Greedy, seeded, and of one token or several beginnings in common; twice, so that prefixes are there."""
    prompts = [*PROMPTS, [5], [*PROMPTS[0], 9, 9]]
    params = [SamplingParams(max_tokens=16, ignore_eos=True, temperature=i % 2, seed=i) for i in range(len(prompts))]
    expected = tokens(say(plain(folder, **WAYS[way]), params, prompts))
    llm = make(folder, head, method="eagle3", **WAYS[way])
    for _ in range(2):
        assert tokens(say(llm, params, prompts)) == expected
    assert llm.engine.speculation.metrics.num_draft_tokens > 10
    drafter = llm.engine.runner.drafter
    llm.engine.step()
    assert not drafter.store.kept and drafter.manager.pool.num_free == drafter.manager.pool.num_blocks


def test_samples_without_a_seed_penalties_and_what_the_head_cannot_draft(folder):
    """What is drawn by chance is verified by rejection. A request whose allowed tokens the head has no row for, or that
    has a grammar, is served like any other."""
    kept = load_file(folder / "narrow" / "model.safetensors")
    absent = [token for token in range(4, VOCAB_SIZE) if not kept["t2d"][token]][:5]
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, n=2),
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.7, allowed_token_ids=absent),
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0, allowed_token_ids=absent, logprobs=2),
        SamplingParams(max_tokens=12, temperature=0.9, structured_outputs={"regex": "[a-z ]{4,9}"}),
    ]
    llm = make(folder)
    for _ in range(3):
        found = tokens(say(llm, params))
        assert set(found[1][0]) | set(found[2][0]) <= set(absent)
        assert found[2] == tokens(say(plain(folder), params[2], [PROMPTS[2]]))[0]


@pytest.mark.parametrize("attention", [pytest.param("triton", marks=needs_triton)])
def test_recorded_steps_and_fused_kernels_draft_the_same(attention, folder, tmp_path):
    eagle3_writer.write(tmp_path / "head", head_dim=16)
    spec = {"method": "eagle", "model": tmp_path / "head", "num_speculative_tokens": 2}
    params, found = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True), []
    for backend in ("torch", attention):
        llm = LLM(
            folder / "triton", device="cpu", dtype="float32", attention_backend=backend, speculative_config=spec,
            num_kv_blocks=20, block_size=4, max_num_batched_tokens=32,
        )  # fmt: skip
        drafter, logits = llm.engine.runner.drafter, []
        forward = drafter.forward
        drafter.forward = lambda rows, ids, forward=forward, logits=logits: (
            logits.append(forward(rows, ids).clone()) or logits[-1]
        )
        said = tokens(say(llm, params, [[*range(20, 29)]]))
        found.append((said, [one.clone() for one in logits]))
    assert found[0][0] == found[1][0] == tokens(say(plain(folder, "triton"), params, [[*range(20, 29)]]))
    assert len(found[0][1]) == len(found[1][1]) > 2
    for one, other in zip(found[0][1], found[1][1]):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_a_head_that_knows_the_next_token_is_accepted(folder, tmp_path):
    """The target's layers add nothing, so a token alone decides which follows it; the head's rows are told which token
    comes two after the one whose state they read."""
    save_tiny_llama(tmp_path / "target", num_hidden_layers=LAYERS, hidden_size=128)
    path = tmp_path / "target" / "model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    save_file(weights, path, metadata={"format": "pt"})
    embedding, head, norm = (
        weights[name] for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    )
    unit = torch.nn.functional.normalize(embedding, dim=-1)
    following = (unit * norm @ head.t()).argmax(-1)  # of each token
    sizes = dict(hidden_size=128, target_hidden_size=None, draft_vocab_size=None, num_attention_heads=4)
    tensors = eagle3_writer.random_tensors(eagle3_writer.CONFIG | sizes)
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        tensors[name].zero_()
    tensors["fc.weight"] = torch.cat([torch.eye(128), torch.zeros(128, 256)], dim=1)
    tensors["norm.weight"].fill_(1)
    tensors["lm_head.weight"].zero_().index_add_(0, following[following], unit)
    eagle3_writer.write(tmp_path / "head", tensors, **sizes)
    llm = make(tmp_path, "head")
    prompts = [[token] for token in range(10, 40)]
    assert tokens(say(llm, GREEDY, prompts)) == tokens(say(plain(tmp_path), GREEDY, prompts))
    metrics = llm.engine.speculation.metrics
    assert metrics.num_accepted_tokens > 0.2 * metrics.num_draft_tokens > 0  # the first of three is nearly always right
    eagle3_writer.write(tmp_path / "random", **sizes)
    llm = make(tmp_path, "random")
    say(llm, GREEDY, prompts)
    by_chance = llm.engine.speculation.metrics
    assert by_chance.num_accepted_tokens < 0.05 * by_chance.num_draft_tokens


def test_names_of_tensors_and_of_the_architecture_as_vllm_writes_them(folder, tmp_path):
    tensors = load_file(folder / "narrow" / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    eagle3_writer.write(tmp_path / "head", renamed, architectures=["Eagle3LlamaForCausalLM"])
    seen = []
    for one in (folder / "narrow", tmp_path / "head"):
        llm = LLM(
            folder / "target", device="cpu", dtype="float32", speculative_config={"method": "eagle3", "model": one}
        )
        seen.append((tokens(say(llm, GREEDY)), llm.engine.speculation.metrics.num_accepted_tokens))
        head = llm.engine.runner.drafter.forward.head
        assert torch.equal(head.token_of, torch.arange(70) + tensors["d2t"])
    assert seen[0] == seen[1]


def test_the_states_are_those_behind_layers_2_the_middle_and_3_before_the_end(folder):
    for layers, states in ((8, (2, 4, 5)), (32, (2, 16, 29)), (36, (2, 18, 33))):
        target = load_config(folder / "target")
        object.__setattr__(target, "num_layers", layers)
        assert Eagle3Config.load(folder / "narrow", target).feature_layers == states
    target = load_config(folder / "target")
    assert Eagle3Config.load(folder / "other states", target).feature_layers == (1, 3, 8)
    assert SpeculativeConfig("eagle3", model="x").method == "eagle"


def test_the_cache_counts_the_weights_that_there_are(folder):
    for name in HEADS:
        head = Eagle3Config.load(folder / name, load_config(folder / "target"))
        tensors = load_file(folder / name / "model.safetensors")
        stored = sum(tensor.numel() for key, tensor in tensors.items() if key not in ("d2t", "t2d"))
        assert head.num_parameters == stored, name


# Errors


def change_tensor(name, change):
    def apply(tensors):
        tensors[name] = change(tensors[name]).contiguous()

    return apply


def drop(name):
    return lambda tensors: tensors.pop(name)


REFUSED = {
    "another architecture": (dict(architectures=["Qwen3ForCausalLMEagle3"]), None,
        r"architectures=\['Qwen3ForCausalLMEagle3'\] .* read are LlamaForCausalLMEagle3 and Eagle3LlamaForCausalLM"),
    "EAGLE's first layout": (dict(architectures=["EagleLlamaForCausalLM"]), None, "is not read as a draft head"),
    "another model type": (dict(model_type="qwen3"), None, "with model_type='qwen3' is not read"),
    "speculators": (dict(speculators_model_type="eagle3"), None, "format of `speculators` .* is not read"),
    "two layers": (dict(num_hidden_layers=2), None, "num_hidden_layers=2 is not supported in a draft head; .*: 1"),
    "norms before fc": (dict(norm_before_fc=True), None, "norm_before_fc=True is not supported in a draft head"),
    "a bias": (dict(attention_bias=True), None, "attention_bias=True is not supported in a draft head"),
    "one state": (dict(eagle_config={"use_aux_hidden_state": False}), None, "use_aux_hidden_state=False"),
    "quantized": (dict(quantization_config={"quant_method": "fp8"}), None, "quantization_config=.* is not supported"),
    "another target's width": (dict(target_hidden_size=64), None,
        "the draft head has target_hidden_size=64, the model's hidden_size is 48"),
    "another target's vocabulary": (dict(vocab_size=301), None, "has vocab_size=301, the model's vocab_size is 300"),
    "no states": (dict(eagle_config={LAYER_IDS: [1, 3, 9]}), None,
        r"eagle_aux_hidden_state_layer_ids=\[1, 3, 9\] does not fit a model of 8 layers; allowed: a list of different"),
    "a state twice": (dict(eagle_aux_hidden_state_layer_ids=[3, 3, 8]), None, r"\[3, 3, 8\] does not fit"),
    "no states at all": (dict(eagle_aux_hidden_state_layer_ids=[]), None, r"layer_ids=\[\] does not fit"),
    "another number of states": (dict(num_aux_hidden_states=4), None, "num_aux_hidden_states=4 does not fit"),
    "a flag that is a text": (dict(norm_before_residual="false"), None,
        "norm_before_residual='false' is not allowed; allowed: true or false"),
    "settings in a list": (dict(eagle_config=[1, 3, 8]), None,
        r"eagle_config=\[1, 3, 8\] is not allowed; allowed: an object of names and values"),
    "a size that is a text": (dict(draft_vocab_size="70"), None, "draft_vocab_size='70' is not allowed"),
    "no size": (dict(hidden_size=None), None, "hidden_size is missing"),
    "more draft tokens than tokens": (dict(draft_vocab_size=400), None, "draft_vocab_size=400 exceeds vocab_size=300"),
    "no d2t": ({}, drop("d2t"), "d2t is missing: it says which 70 of 300 tokens the rows of lm_head.weight are"),
    "d2t in numbers": ({}, change_tensor("d2t", lambda d2t: d2t.float()), r"d2t is float32 \[70\]; .* whole numbers"),
    "d2t too short": ({}, change_tensor("d2t", lambda d2t: d2t[:69]), r"d2t is int64 \[69\]; draft_vocab_size=70"),
    "d2t of ids": ({}, change_tensor("d2t", lambda d2t: d2t + torch.arange(70)), "d2t leads to tokens .*differences"),
    "d2t of one token": ({}, change_tensor("d2t", lambda d2t: -torch.arange(70)), "1 different ones; needed are 70"),
    "no matrix": ({}, drop("midlayer.self_attn.q_proj.weight"), "1 missing: midlayer.self_attn.q_proj.weight"),
    "a tensor by two names": (
        {}, lambda tensors: tensors.update({"model.norm.weight": 2 * tensors["norm.weight"]}),
        r"have norm.weight twice, once as (model\.)?norm.weight; keep one of them"),
    "no output matrix": ({}, drop("lm_head.weight"), "missing: .*lm_head.weight"),
    "attention over the feature alone": (
        {}, change_tensor("midlayer.self_attn.k_proj.weight", lambda k: k[:, :32]),
        r"midlayer.self_attn.k_proj.weight is \[16, 32\], the configuration says \[16, 64\]"),
    "no embedding": ({}, drop("embed_tokens.weight"), "for target_hidden_size=48 has no embed_tokens.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_by_name(name, folder, tmp_path):
    changed, break_it, said = REFUSED[name]
    tensors = load_file(folder / "narrow" / "model.safetensors")
    if break_it is not None:
        break_it(tensors)
    eagle3_writer.write(tmp_path / "head", tensors, **changed)
    with pytest.raises(ValueError, match=said):
        make(tmp_path, "head", folder / "target")


def test_other_folders_are_told_apart(folder, tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match=r"\[2, 2, 1\] \(not written, so EAGLE-3's own\) does not fit a model of 4 layers"
    ):
        make(folder, "narrow", "shallow")
    with pytest.raises(CheckpointError, match=r"is a folder without drafter_config.* nor a head in EAGLE-3's layout"):
        make(folder, "target")
    eagle3_writer.write(tmp_path / "head")
    (tmp_path / "head" / "model.safetensors").rename(tmp_path / "head" / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"has pytorch_model.bin and no .*torch.load\('pytorch_model.bin', weights"
    ):
        make(tmp_path, "head", folder / "target")
    monkeypatch.setattr("minillm.speculative.eagle_config.download", lambda hub_id: folder / "narrow")
    assert resolve_head("someone/EAGLE3-head") == folder / "narrow"
    with pytest.raises(NotImplementedError, match=r"method='eagle' with tensor_parallel_size=2 is not served"):
        make(folder, tensor_parallel_size=2)
    assert eagle.load_head_config(folder / "narrow", load_config(folder / "target")).vocab_size == VOCAB_SIZE
