"""vLLM's keywords, methods and modules over minillm's own: each against what it stands for."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import weakref
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

import minillm
from minillm import LLM, BeamSearchParams, EngineArgs, LLMEngine, PoolingParams, SamplingParams
from minillm.engine import pooling, vllm_absent, vllm_names
from minillm.sampling_params import RequestOutputKind
from tests.helpers.tiny import byte_tokenizer, save_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = "the cat sat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(path)
    return path


@pytest.fixture(scope="module")
def oracle(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(str(folder), device="cpu")


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_every_public_name_is_there_and_others_say_what_to_use():
    for name in minillm.__all__:
        assert getattr(minillm, name) is not None
    for module in ("sampling_params", "outputs", "inputs", "pooling_params", "lora.request"):
        loaded = importlib.import_module(f"minillm.{module}")
        assert all(hasattr(loaded, name) for name in loaded.__all__)
    with pytest.raises(ImportError, match=r"minillm has no ModelRegistry: one decoder serves every family"):
        from minillm import ModelRegistry  # noqa: F401
    assert not hasattr(minillm, "AsyncLLMEngin")


def test_a_prompt_may_come_in_every_form(llm):
    ids = byte_tokenizer().encode(PROMPT)
    forms = [PROMPT, {"prompt": PROMPT}, ids, tuple(ids), {"prompt_token_ids": ids, "prompt": None}]
    forms.append({"prompt_token_ids": ids, "prompt": "its text", "cache_salt": None})
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [ids] * len(forms)
    assert [output.prompt for output in outputs] == [PROMPT, PROMPT, None, None, None, "its text"]
    assert tokens(llm.generate(ids, GREEDY, use_tqdm=False)) == tokens(outputs)[:1]


def test_synonyms_reach_the_engine_and_none_is_the_default(folder):
    llm = LLM(
        str(folder), device="cpu", num_gpu_blocks_override=40, max_num_seqs=None, block_size=None, swap_space=4,
        trust_remote_code=False, data_parallel_size=1, spec_method="ngram", spec_tokens=2, max_logprobs=20,
        override_generation_config={"temperature": 0.0, "max_new_tokens": 3}, kv_offloading_size=0.001,
    )  # fmt: skip
    assert llm.engine.kv_cache.pool.num_blocks == 40 and llm.config.max_num_seqs == 256 and llm.config.block_size == 16
    assert llm.config.host_kv_bytes == int(0.001 * 2**30) and llm.engine.speculation.num_tokens == 2
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=3)
    with pytest.raises(ValueError, match="num_kv_blocks=30 is given under two names"):
        LLM(str(folder), num_kv_blocks=30, num_gpu_blocks_override=40)


@pytest.mark.parametrize("name", sorted(vllm_absent.KEYWORDS))
def test_a_keyword_that_is_not_built_is_refused_with_its_reason(name):
    absent = vllm_absent.KEYWORDS[name]
    assert vllm_names.translated({name: None}) == vllm_names.translated({name: absent.default})
    with pytest.raises(NotImplementedError) as raised:
        LLM("no model is looked for", **{name: "another value"})
    assert str(raised.value) == f"{name}='another value' is not served: {absent.why}"


def test_a_keyword_that_neither_has_is_refused_with_the_nearest():
    with pytest.raises(TypeError, match=r"LLM has no argument max_num_sequences; did you mean max_num_seqs\?"):
        LLM("no model is looked for", max_num_sequences=4)
    with pytest.raises(AttributeError, match=r"LLM\.wait_for_completion is not built: .*step"):
        LLM.__getattr__(object.__new__(LLM), "wait_for_completion")


def test_the_engine_of_vllm_gives_what_generate_gives(folder, llm):
    kinds = {"0": RequestOutputKind.CUMULATIVE, "1": RequestOutputKind.DELTA, "2": RequestOutputKind.FINAL_ONLY}
    drawn = SamplingParams(n=2, temperature=0.8, seed=1, max_tokens=6, stop="zz", logprobs=1)
    [expected] = llm.generate(PROMPT, drawn, use_tqdm=False)
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(folder), device="cpu"))
    for name, kind in kinds.items():
        params = drawn.clone()
        params.output_kind = kind
        assert engine.add_request(name, PROMPT, params, priority=1) == name
    with pytest.raises(ValueError, match="request_id='1' is under way"):
        engine.add_request("1", PROMPT, GREEDY)
    heard: dict[str, list] = {name: [] for name in kinds}
    while engine.has_unfinished_requests():
        for output in engine.step():
            heard[output.request_id].append(output)
    assert engine.get_num_unfinished_requests() == 0 and not engine.llm.engine.has_unfinished
    assert [len(heard["2"]), heard["0"][-1].finished, heard["0"][0].finished] == [1, True, False]
    for name, outputs in heard.items():
        assert outputs[-1].finished and outputs[-1].num_cached_tokens is not None
        for index, sample in enumerate(expected.outputs):
            parts = [one for output in outputs for one in output.outputs if one.index == index]
            if name == "1":
                assert "".join(part.text for part in parts) == sample.text
                assert [one for part in parts for one in part.token_ids] == sample.token_ids
                assert [row for part in parts for row in part.logprobs] == sample.logprobs
            else:
                assert (parts[-1].text, parts[-1].token_ids) == (sample.text, sample.token_ids)
                assert all(sample.text.startswith(part.text) for part in parts)
            assert parts[-1].finish_reason == sample.finish_reason and parts[-1].finished()


def test_a_request_of_the_engine_may_be_aborted(folder):
    engine = LLMEngine.from_engine_args(EngineArgs(str(folder), device="cpu", max_num_seqs=4))
    engine.add_request("gone", PROMPT, GREEDY)
    engine.add_request("stays", PROMPT, GREEDY)
    engine.step()
    engine.abort_request(["gone", "never was"])
    heard = []
    while engine.has_unfinished_requests():
        heard += engine.step()
    assert {output.request_id for output in heard} == {"stays"}
    assert heard[-1].outputs[0].token_ids == tokens(engine.llm.generate(PROMPT, GREEDY, use_tqdm=False))[0]


def test_a_step_that_fails_leaves_no_request_of_the_engine_behind(folder, monkeypatch):
    engine = LLMEngine.from_engine_args(EngineArgs(str(folder), device="cpu", async_scheduling=False))
    engine.add_request("0", PROMPT, GREEDY)
    with monkeypatch.context() as broken:
        broken.setattr(type(engine.llm.model), "forward", None)
        with pytest.raises(TypeError):
            engine.step()
    assert not engine.has_unfinished_requests() and engine.get_num_unfinished_requests() == 0
    engine.add_request("0", PROMPT, GREEDY)
    engine.sleep()
    assert not engine.has_unfinished_requests()
    engine.wake_up()
    engine.add_request("0", PROMPT, GREEDY)
    assert [output.request_id for output in engine.step()] == ["0"]


def test_tokens_that_another_caller_steps_for_are_handed_out_too(folder):
    engine = LLMEngine.from_engine_args(EngineArgs(str(folder), device="cpu"))
    params = GREEDY.clone()
    params.output_kind = RequestOutputKind.DELTA
    engine.add_request("0", PROMPT, params)
    [expected] = engine.llm.generate(PROMPT, GREEDY, use_tqdm=False)
    heard = []
    while engine.has_unfinished_requests():
        heard += [token for output in engine.step() for token in output.outputs[0].token_ids]
    assert heard == expected.outputs[0].token_ids


def test_engine_arguments_come_from_a_command_line():
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    args = EngineArgs.from_cli_args(parser.parse_args(["--max-num-seqs", "3", "--enforce-eager", "--model", "m"]))
    assert (args.max_num_seqs, args.enforce_eager, args.model, args.block_size) == (3, True, "m", 16)
    with pytest.raises(TypeError, match="LLM has no argument max_seqs"):
        EngineArgs("m", max_seqs=3)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.a }}){% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}{{ loud or '' }}"
)


def test_a_chat_has_the_options_of_vllm(llm, tmp_path):
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 5}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "6"},
    ]  # fmt: skip

    def prompt(messages=talk, **options):
        return llm.chat(messages, GREEDY, use_tqdm=False, **{"chat_template": TEMPLATE} | options)[0].prompt

    assert prompt() == "<user>one\ntwo<assistant>add(5)<tool>6<assistant>"
    assert prompt(tools=TOOLS, chat_template_kwargs={"loud": "!"}) == f"[add]{prompt()}!"
    assert prompt(chat_template_content_format="openai").startswith("<user>(one)(two)<assistant>")
    opened = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert prompt(opened, add_generation_prompt=False) == "<user>a<assistant>b"
    going_on = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompt([*opened[:1], {"role": "assistant", "content": "b "}], **going_on) == "<user>a<assistant>b "
    (tmp_path / "template.jinja").write_text("from a file: {{ messages[0].content }}")
    assert prompt(opened, chat_template=tmp_path / "template.jinja") == "from a file: a"
    for wrong, told in (
        ({"chat_template": "no file"}, "chat_template='no file'"),
        ({"chat_template_content_format": "xml"}, "chat_template_content_format='xml'.*auto, string, openai"),
        ({"continue_final_message": True}, "continue_final_message=True goes on with the last message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type 'image_url'.*serves text"),
    ):
        with pytest.raises(ValueError, match=told):
            prompt(**wrong)


def test_prefixes_are_forgotten_when_nothing_is_under_way(llm):
    text = PROMPT * 4
    llm.generate(text, GREEDY, use_tqdm=False)
    [again] = llm.generate(text, GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == again.metrics.num_cached_tokens > 0
    sink = llm.submit(text, GREEDY)
    assert not llm.reset_prefix_cache() and llm.reset_prefix_cache(reset_running_requests=True)
    assert sink.is_finished and llm.generate(text, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_metrics_count_what_was_served(folder):
    llm = LLM(str(folder), device="cpu", speculative_config={"method": "ngram", "prompt_lookup_min": 1})
    outputs = llm.generate([PROMPT * 8, PROMPT * 8, "the"], GREEDY, use_tqdm=False)
    outputs += llm.generate([PROMPT * 8], SamplingParams(n=2, seed=1, max_tokens=3), use_tqdm=False)
    found = {metric.name.removeprefix("vllm:"): metric for metric in llm.get_metrics()}
    assert found["prompt_tokens"].value == sum(len(output.prompt_token_ids) for output in outputs)
    assert found["prefix_cache_hits"].value == sum(output.num_cached_tokens for output in outputs) > 0
    samples = [sample for output in outputs for sample in output.outputs]
    assert found["generation_tokens"].value == sum(len(sample.token_ids) for sample in samples)
    assert found["request_success"].labels == {"finished_reason": "length"}
    assert found["request_success"].value == len(samples) == found["e2e_request_latency_seconds"].buckets["+Inf"]
    assert found["num_requests_running"].value == 0
    drafted = sum(output.metrics.num_drafted_tokens for output in outputs)
    assert found["spec_decode_num_draft_tokens"].value == drafted > 0
    accepted = found["spec_decode_num_accepted_tokens_per_pos"].values
    assert sum(accepted) == found["spec_decode_num_accepted_tokens"].value


def test_metrics_of_a_request_have_the_names_of_vllm(llm):
    metrics = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].metrics
    assert metrics.num_generation_tokens == 6 and metrics.first_token_latency == metrics.ttft
    assert metrics.arrival_time <= metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts
    assert metrics.first_token_ts <= metrics.last_token_ts <= metrics.finished_time and metrics.time_in_queue >= 0


def test_a_profile_is_a_file_for_perfetto(folder, tmp_path):
    llm = LLM(str(folder), device="cpu", profiler_config={"torch_profiler_dir": str(tmp_path / "traces")})
    with pytest.raises(RuntimeError, match="call start_profile"):
        llm.stop_profile()
    llm.generate(PROMPT, GREEDY, use_tqdm=False)
    llm.start_profile("mine")
    llm.generate(PROMPT, GREEDY, use_tqdm=False)
    path = llm.stop_profile()
    assert path == tmp_path / "traces" / "mine-trace.json"
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["name"] == "forward" for event in events) == 6
    llm.generate(PROMPT, GREEDY, use_tqdm=False)
    assert len(llm.trace.spans) == sum(event["ph"] == "X" for event in events)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_the_memory_and_waking_serves_as_before(folder, level):
    llm = LLM(str(folder), device="cpu")
    before = tokens(llm.generate(PROMPT, GREEDY, use_tqdm=False))
    sink = llm.submit(PROMPT, GREEDY)
    cache, weights = weakref.ref(llm.engine.runner.cache), weakref.ref(llm.model)
    llm.sleep(level)
    gc.collect()
    assert llm.is_sleeping() and sink.is_finished and cache() is None and (weights() is None) == (level == 2)
    for call in (lambda: llm.generate(PROMPT), lambda: llm.embed(PROMPT), lambda: llm.submit(PROMPT)):
        with pytest.raises(RuntimeError, match=r"asleep.*call wake_up"):
            call()
    llm.sleep(level)
    llm.wake_up(tags=["weights"])
    assert llm.is_sleeping()
    llm.wake_up(tags=["kv_cache"])
    assert not llm.is_sleeping() and tokens(llm.generate(PROMPT, GREEDY, use_tqdm=False)) == before


def hidden_of(oracle, text: str) -> torch.Tensor:
    with torch.inference_mode():
        return oracle.model(torch.tensor([byte_tokenizer().encode(text)])).last_hidden_state[0]


@pytest.mark.parametrize("chunk", [2, 2048])
def test_vectors_are_the_hidden_states_of_transformers(folder, llm, oracle, chunk, monkeypatch):
    monkeypatch.setattr(pooling, "CHUNK", chunk)
    mean = LLM(str(folder), device="cpu", runner="pooling", pooler_config={"pooling_type": "MEAN"})
    unit = torch.nn.functional.normalize
    texts = [PROMPT, "a"]
    for text, each, one, other, cut in zip(
        texts,
        llm.encode(texts, pooling_task="token_embed", use_tqdm=False),
        llm.embed(texts, use_tqdm=False),
        mean.embed(texts, use_tqdm=False),
        llm.embed(texts, pooling_params=PoolingParams(dimensions=5, use_activation=False), use_tqdm=False),
    ):
        hidden = hidden_of(oracle, text)
        assert each.prompt_token_ids == byte_tokenizer().encode(text) and each.finished
        torch.testing.assert_close(each.outputs.data, hidden)
        torch.testing.assert_close(torch.tensor(one.outputs.embedding), unit(hidden[-1], dim=-1))
        torch.testing.assert_close(torch.tensor(other.outputs.embedding), unit(hidden.mean(0), dim=-1))
        torch.testing.assert_close(torch.tensor(cut.outputs.embedding), hidden[-1][:5])
        assert one.outputs.hidden_size == hidden.shape[1]


def test_a_score_is_the_cosine_of_two_vectors(llm, oracle):
    texts = [PROMPT, "a", "the mat"]
    a, *others = (torch.nn.functional.normalize(hidden_of(oracle, text)[-1], dim=-1) for text in texts)
    scores = [output.outputs.score for output in llm.score(texts[0], texts[1:], use_tqdm=False)]
    assert scores == pytest.approx([float(a @ other) for other in others], abs=1e-5)
    [same] = llm.score(texts[:1], texts[:1], use_tqdm=False)
    assert same.outputs.score == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(ValueError, match="data_1 has 2 texts and data_2 3; allowed: 1, or as many"):
        llm.score(texts[:2], texts, use_tqdm=False)


def test_beams_have_the_shape_of_vllm_too(llm):
    params = BeamSearchParams(beam_width=3, max_tokens=5)
    [output] = llm.beam_search([{"prompt": PROMPT}], params)
    [named] = llm.beam_search(PROMPT, beam_width=3, max_tokens=5)
    assert [sample.token_ids for sample in output.outputs] == [sample.token_ids for sample in named.outputs]
    for sequence, sample in zip(output.sequences, output.outputs):
        assert sequence.tokens == output.prompt_token_ids + sample.token_ids
        assert sequence.text == PROMPT + sample.text and sequence.cum_logprob == sample.cumulative_logprob
    params.beam_width = 0
    with pytest.raises(ValueError, match="beam_width=0 is not allowed"):
        llm.beam_search(PROMPT, params)
    with pytest.raises(NotImplementedError, match=r"temperature=0\.5 is not served"):
        BeamSearchParams(2, 4, temperature=0.5)


def test_dummy_weights_are_replaced_when_they_are_loaded(folder, llm):
    before = tokens(llm.generate(PROMPT, GREEDY, use_tqdm=False))
    dummy = LLM(str(folder), device="cpu", load_format="dummy")
    assert tokens(dummy.generate(PROMPT, GREEDY, use_tqdm=False)) != before
    assert dummy.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},)) == [None]
    assert dummy.collective_rpc("reload_weights") == [None]
    assert tokens(dummy.generate(PROMPT, GREEDY, use_tqdm=False)) == before
    assert dummy.collective_rpc(lambda llm, one: (llm.max_model_len, one), args=(5,)) == [(llm.max_model_len, 5)]
    with pytest.raises(NotImplementedError, match=r"'save_sharded_state'.*give a function"):
        dummy.collective_rpc("save_sharded_state")
    with pytest.raises(ValueError, match="load_format='dummy' has plain weights, quantization='int8'"):
        LLM(str(folder), load_format="dummy", quantization="int8")


@pytest.mark.parametrize("method", ["generate", "chat", "encode", "embed", "score"])
def test_keywords_of_calls_that_are_not_built_are_refused_by_name(llm, method):
    call = partial(getattr(llm, method), *(["a", "b"] if method == "score" else ["a"]), use_tqdm=False)
    with pytest.raises(NotImplementedError, match=r"tokenization_kwargs=.* is not served: encode the prompt with"):
        call(tokenization_kwargs={"truncation": True})
    with pytest.raises(NotImplementedError, match=r"mm_processor_kwargs=.* is not served: the book serves text"):
        call(mm_processor_kwargs={"crops": 4})
    with pytest.raises(TypeError, match=rf"LLM.{method}\(\) has no keyword 'sampling'; see help\(LLM.{method}\)"):
        call(sampling=1)


def test_keywords_of_calls_that_ask_for_nothing_are_taken(llm):
    assert llm.embed("a", use_tqdm=False, tokenization_kwargs=None)
