"""A draft head: its forward pass in the engine is the one it was trained with, and its drafts change no token."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from minillm import LLM, SamplingParams
from minillm.book.roads.models import write_head
from minillm.engine.engine import Engine
from minillm.model.checkpoint import load_config
from minillm.model.errors import CheckpointError
from minillm.model.features import FeatureTap
from minillm.speculative.eagle import FeatureStore
from minillm.speculative.eagle_config import FILE, HeadConfig, resolve_head
from minillm.speculative.metrics import SpeculationMetrics
from minillm.training import acceptance, eagle, own_text
from minillm.training.eagle_model import HeadModel, read_target
from minillm.zoo import corpus
from tests.helpers.kernel_cases import needs_triton
from tests.helpers.speculating import PROMPTS, say, tokens, write_models
from tests.helpers.tiny import save_tiny_llama

CPU = torch.device("cpu")
TOY = eagle.DrafterConfig(
    hidden_size=16, num_heads=2, num_kv_heads=1, intermediate_size=16, tokens=8 * 64, tokens_per_batch=64,
    stages=((1.0, 32),), unroll=((1.0, 3),), feature_layers=(1, 2), own_text=0.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = write_models(tmp_path_factory.mktemp("models"))
    save_tiny_llama(path / "wide", head_dim=16)  # Triton's kernels take 16 and more
    write_head(path / "head", load_config(path / "target"), 3)
    return path


def make(folder, target="target", **settings) -> LLM:
    spec = {"method": "eagle", "model": folder / "head", "num_speculative_tokens": 3}
    return LLM(folder / target, device="cpu", dtype="float32", speculative_config=spec, **settings)


def read_head(path, head, target) -> HeadModel:
    """A head as it was trained."""
    model = HeadModel(head.head, target)
    with torch.no_grad():
        for name, weight in load_file(path / "model.safetensors").items():
            model.weights[name.removesuffix(".weight").replace(".", "/")].copy_(weight)
    return model


# The head and its training


def test_the_engine_drafts_what_the_unrolled_steps_of_training_predict(folder):
    """Step s of the training-time test, at the last position of a text, is the s-th draft token's distribution.
    The draft goes on into a new block."""
    llm = make(folder, block_size=5, enable_prefix_caching=False)
    drafter, head = llm.engine.runner.drafter, llm.engine.runner.drafter.forward.head
    seen, forward = [], drafter.forward
    drafter.forward = lambda rows, ids: seen.append(forward(rows, ids)) or seen[-1]
    prompt = [5, 6, 7, 8, 9, 10, 11]
    [output] = say(llm, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), [prompt])
    assert not seen  # the last token takes no draft
    [output] = say(llm, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True), [[*prompt, 12]])
    text = [*prompt, 12, output.outputs[0].token_ids[0]]
    drafted = [int(logits[0].argmax()) for logits in seen[:3]]
    model = read_head(folder / "head", head, llm.model)
    rows = torch.tensor([[*text, *drafted[:2]]])
    tap = FeatureTap(llm.model, head.head.feature_layers, 64)
    states, _ = read_target(llm.model, tap, rows)
    with torch.no_grad():
        found = model(states, rows, 3)
    for step in range(3):
        torch.testing.assert_close(found[step][0, len(text) - 1 + step], seen[step][0], atol=2e-4, rtol=1e-3)


def test_accepted_tokens_are_read_again_with_the_targets_features(folder):
    """Whatever was accepted before, the first pass of a draft gives what the head gives for the whole text so far."""
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    prompt = [5, 6, 7, 8, 9, 10, 11]
    text = prompt + tokens(say(LLM(folder / "target", device="cpu", dtype="float32"), params, [prompt]))[0][0]
    llm = make(folder, block_size=4)
    drafter, head = llm.engine.runner.drafter, llm.engine.runner.drafter.forward.head
    ends, seen, forward = [], [], drafter.forward

    def recorded(rows, ids):
        logits, ends[:] = forward(rows, ids), [rows[0].start + rows[0].num_tokens]
        if ids is None:
            seen.append((ends[0], logits[0].clone()))
        return logits

    drafter.forward = recorded
    drafter.sampler.choose = lambda logits, metadata: torch.tensor([text[ends[0]]])  # every draft token is accepted
    assert prompt + tokens(say(llm, params, [prompt]))[0][0] == text
    assert llm.engine.speculation.metrics.num_accepted_tokens == llm.engine.speculation.metrics.num_draft_tokens > 6
    model, tap = read_head(folder / "head", head, llm.model), FeatureTap(llm.model, head.head.feature_layers, 64)
    for end, logits in seen:
        rows = torch.tensor([text[:end]])
        with torch.no_grad():
            [found] = model(read_target(llm.model, tap, rows)[0], rows, 1)
        torch.testing.assert_close(found[0, -1], logits, atol=2e-4, rtol=1e-3)


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    return out, train(folder, out)


def train(folder, out, config=TOY, **options) -> list[float]:
    losses = []
    eagle.train(config, out, CPU, lambda progress: losses.append(progress.loss), base=folder / "target", **options)
    return losses


def test_training_goes_on_where_it_was_and_depends_on_its_seed(folder, trained, tmp_path):
    out, whole = trained
    resumed = [loss for _ in range(3) for loss in train(folder, tmp_path / "a", stop_after=3)]
    assert resumed == whole and len(whole) == TOY.num_steps == 8
    files = [(one / "model.safetensors").read_bytes() for one in (out, tmp_path / "a")]
    assert files[0] == files[1] and not (tmp_path / "a" / "training.pt").exists()
    assert train(folder, tmp_path / "b", replace(TOY, seed=1), stop_after=2) != whole[:2]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    spec = {"method": "eagle", "model": out}
    plain, drafting = (
        LLM(folder / "target", device="cpu", dtype="float32", speculative_config=one) for one in (None, spec)
    )
    assert tokens(say(drafting, params)) == tokens(say(plain, params))


def test_half_of_the_text_is_what_the_target_itself_generates(folder):
    config, tokenizer = replace(TOY, own_text=0.5), Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
    own = own_text.OwnText(folder / "target", torch.float32, CPU)
    plain = eagle.rows_of(replace(config, own_text=0.0), 9, tokenizer, None)
    rows, weights, is_own = eagle.rows_of(config, 9, tokenizer, own)
    assert is_own.tolist() == [True, False] and not plain[2].any()
    assert torch.equal(rows[1], plain[0][1]) and torch.equal(weights[1], plain[1][1])
    again = eagle.rows_of(config, 9, tokenizer, own_text.OwnText(folder / "target", torch.float32, CPU))
    assert torch.equal(rows, again[0]) and torch.equal(weights, again[1])
    assert not torch.equal(rows[0], eagle.rows_of(config, 8, tokenizer, own)[0][0])
    for length in (20, 33):  # a stage of training ends in the middle of what is made together
        assert own.rows(config, 9, tokenizer, 2, length)[0].shape == (2, length)
    llm = LLM(folder / "target", device="cpu", dtype="float32")
    own_documents, made = own._documents(random.Random(1), tokenizer, 2.0), 0
    for _ in range(4):
        ids, worth = next(own_documents)
        count = worth.index(2.0)
        params = SamplingParams(temperature=0.0, max_tokens=len(ids) - count)
        assert tokens(say(llm, params, [ids[:count]]))[0][0] == ids[count:]
        made += len(ids) - count
    assert made > 40


def test_in_its_own_text_the_targets_token_weighs_more():
    logits = torch.tensor([[[0.1, 0.0]], [[0.1, 0.0]]])
    wanted = eagle.wanted_of(logits, torch.tensor([True, False]), 0.5)
    torch.testing.assert_close(wanted[1], logits[1].softmax(-1))
    torch.testing.assert_close(wanted[0], (logits[0].softmax(-1) + torch.tensor([[1.0, 0.0]])) / 2)


def test_the_bundled_head_is_small_and_drafts_stories():
    path = resolve_head("tinyworld-eagle")
    assert sum(file.stat().st_size for file in path.iterdir()) <= 2_000_000
    prompts = [document.text.split(". ")[0] for document in corpus.held_out("story", 24)]
    params, lengths, texts = SamplingParams(temperature=0.0, max_tokens=48), {}, {}
    for method, model in (("eagle", "tinyworld-eagle"), ("draft_model", "tinyworld-draft"), (None, None)):
        spec = method and {"method": method, "model": model, "num_speculative_tokens": 4}
        llm = LLM("tinyworld", device="cpu", dtype="float32", num_kv_blocks=512, speculative_config=spec)
        texts[method] = tokens(llm.generate(prompts, params, use_tqdm=False))
        if spec:
            lengths[method] = llm.engine.speculation.metrics.mean_acceptance_length
    assert texts["eagle"] == texts["draft_model"] == texts[None]
    assert lengths["draft_model"] > 3 and lengths["eagle"] > lengths["draft_model"] + 0.5


def test_the_report_names_every_task_and_position():
    metrics = SpeculationMetrics()
    for accepted in (4, 2, 0):
        metrics.add(4, accepted)
    first, line = acceptance.lines({"story": metrics})
    assert "held-out" in first and line.split(";")[1] == " 67%, 100%, 50%, 100%"


# In the engine


@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(num_kv_blocks=9, block_size=4),
        dict(max_num_batched_tokens=5),
        dict(num_kv_blocks=9, block_size=4, preemption_mode="swap", host_kv_bytes=10**6),
        dict(enable_prefix_caching=False, kv_cache_dtype="int8"),
        dict(attention_backend="torch", async_scheduling=True),
    ],
)
def test_drafts_of_a_head_change_nothing(folder, settings):
    params = [SamplingParams(max_tokens=16, ignore_eos=True, temperature=i % 2, seed=i) for i in range(len(PROMPTS))]
    plain = LLM(folder / "target", device="cpu", dtype="float32", **settings)
    expected, llm = tokens(say(plain, params)), make(folder, **settings)
    for _ in range(2):
        assert tokens(say(llm, params)) == expected
    assert llm.engine.speculation.metrics.num_draft_tokens > 10
    drafter = llm.engine.runner.drafter
    llm.engine.step()
    assert not drafter.store.kept and drafter.manager.pool.num_free == drafter.manager.pool.num_blocks


@pytest.mark.parametrize("attention", ["auto", pytest.param("triton", marks=needs_triton)])
def test_features_of_samples_chunks_and_recorded_steps_are_the_targets_own(folder, attention):
    """Whatever step computed a token, its feature in the store is that of a whole pass over the text."""
    limits = dict(max_num_batched_tokens=5, block_size=4, num_kv_blocks=20)
    llm = make(folder, "wide", attention_backend=attention, **limits)
    drafter, seen = llm.engine.runner.drafter, []
    forward = drafter.forward

    def checked(rows, ids):
        if ids is None:
            for row in rows:
                features = torch.cat(drafter.store.span(row.request.request_id, row.start, row.start + row.num_tokens))
                seen.append((list(row.request.token_ids), row.start, features.clone()))
        return forward(rows, ids)

    drafter.forward = checked
    say(llm, SamplingParams(n=2, seed=3, max_tokens=5, ignore_eos=True), [[*range(20, 33)]])
    head, tap = forward.head, FeatureTap(llm.model, forward.head.head.feature_layers, 64)
    checked_tokens = 0
    for text, start, features in seen:
        states, _ = read_target(llm.model, tap, torch.tensor([text]))
        whole = head.fuse(states[0])
        known = [at for at, row in enumerate(features) if row.any()]
        for at in known:
            torch.testing.assert_close(features[at], whole[start + at], atol=1e-4, rtol=1e-3)
        checked_tokens += len(known)
    assert checked_tokens >= 12  # all but the last token of the prompt, at least


def test_the_store_forgets_what_was_rejected():
    store = FeatureStore(1, torch.float32, CPU)
    store.add("a", 0, torch.arange(1.0, 6.0)[:, None])  # positions 0 to 4
    store.add("a", 3, torch.tensor([[9.0]]))  # 3 and 4 were drafted, and rejected
    assert torch.cat(store.span("a", -1, 6)).flatten().tolist() == [0, 1, 2, 3, 9, 0, 0]
    store.trim("a", 2, 3)
    assert torch.cat(store.span("a", 1, 4)).flatten().tolist() == [0, 3, 0]
    assert store.knows("a", 2) and not store.knows("a", 3)
    store.add("a", 9, torch.tensor([[5.0]]))  # a gap: begins anew
    assert torch.cat(store.span("a", 2, 10)).flatten().tolist() == [0] * 7 + [5]
    rng = random.Random(0)
    for _ in range(200):  # against a dictionary
        store, truth, end = FeatureStore(1, torch.float32, CPU), {}, 0
        for _ in range(6):
            start = rng.randint(max(0, end - 2), end)
            count = rng.randint(1, 3)
            values = [float(rng.randint(1, 99)) for _ in range(count)]
            store.add("b", start, torch.tensor(values)[:, None])
            truth = {at: value for at, value in truth.items() if at < start} | dict(enumerate(values, start))
            end = start + count
            low = rng.randint(0, end)
            store.trim("b", low, end)
            truth = {at: value for at, value in truth.items() if at >= low}
            wanted = [truth.get(at, 0.0) for at in range(-1, end + 2)]
            assert torch.cat(store.span("b", -1, end + 2)).flatten().tolist() == wanted
        store.trim("b", end, end)
        assert "b" not in store.kept


def test_two_engines_over_one_model_and_long_passes_leave_the_tap_whole(folder):
    llm = make(folder, max_num_batched_tokens=8)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    expected = tokens(say(llm, params))
    second = Engine(llm.model, config=llm.config)
    assert llm.model.tap is not None and len(llm.model.layers[0]._forward_hooks) == 1
    llm.engine = second
    assert tokens(say(llm, params)) == expected


# Errors


def test_errors_name_the_field_and_the_way_out(folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"model='nothing' is neither .* bundled draft head \(tinyworld-eagle\)"):
        LLM("tinyworld", speculative_config={"method": "eagle", "model": "nothing"})
    with pytest.raises(CheckpointError, match="is a folder without drafter_config"):
        LLM("tinyworld", speculative_config={"method": "eagle", "model": folder / "target"})
    with pytest.raises(ValueError, match=r"the draft head has target_hidden_size=\d+, the model's hidden_size is 256"):
        LLM("tinyworld", speculative_config={"method": "eagle", "model": folder / "head"})
    with pytest.raises(ValueError, match="a draft head keeps all of its text, kv_retention does not"):
        make(folder, kv_retention={"sinks": 1, "window": 9})
    for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        with pytest.raises(NotImplementedError, match=r"method='eagle' with .*parallel_size=2 is not served"):
            make(folder, **sizes)
    raw = json.loads((folder / "head" / FILE).read_text())
    for change, says in (
        ({"feature_layers": [1, 9]}, r"feature_layers=\[1, 9\], the model has 2 layers"),
        ({"feature_layers": []}, r"feature_layers=\[\] is not allowed"),
        ({"vocab_size": 7}, "has vocab_size=7, the model's vocab_size is 300"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"heads": 3}, "there is no field 'heads'"),
        ({"intermediate_size": 33}, "do not fit"),
    ):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        path.mkdir()
        (path / FILE).write_text(json.dumps(raw | change))
        (path / "model.safetensors").write_bytes((folder / "head" / "model.safetensors").read_bytes())
        spec = {"method": "eagle", "model": path}
        with pytest.raises(ValueError, match=says):
            LLM(folder / "target", device="cpu", dtype="float32", speculative_config=spec)
    del raw["hidden_size"]
    (path / FILE).write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="hidden_size is missing"):
        HeadConfig.load(path)
