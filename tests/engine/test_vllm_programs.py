"""vLLM's text-only example programs for offline inference, by their call patterns: they run on the bundled model.

Each function is named by vLLM's file, whose calls it makes in the same order, and checks what it gets. What cannot run
here is refused by name, with a reason (`REFUSED`).
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel

from minillm import (
    LLM,
    EngineArgs,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
    zoo,
)
from minillm.lora.request import LoRARequest
from minillm.sampling_params import BeamSearchParams, RequestOutputKind
from tests.helpers.adapters import save_adapter

MODEL = "tinyworld"
PROMPTS = ["Once upon a time", "There was a king", "In the book it says", "The number of Ben is"]
QUIET = {"use_tqdm": False}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(model=MODEL)


def texts(outputs: list[RequestOutput]) -> list[str]:
    assert all(output.finished for output in outputs)
    return [output.outputs[0].text for output in outputs]


def basic(tmp_path: Path) -> None:
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=MODEL)
    outputs = llm.generate(PROMPTS, sampling_params)
    for prompt, output in zip(PROMPTS, outputs):
        assert output.prompt == prompt and isinstance(output.outputs[0].text, str)


def generate(tmp_path: Path) -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    args = vars(parser.parse_args(["--model", MODEL, "--max-model-len", "64"]))
    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 5
    sampling_params.temperature = 0.7
    sampling_params.top_p = 0.9
    sampling_params.top_k = 20
    assert all(len(output.outputs[0].token_ids) <= 5 for output in llm.generate(PROMPTS, sampling_params, **QUIET))


def chat(tmp_path: Path) -> None:
    llm = LLM(model=MODEL)
    conversation = [
        {"role": "user", "content": "Where is Ida?"},
        {"role": "assistant", "content": "Ida is in the garden."},
        {"role": "user", "content": [{"type": "text", "text": "What is the number of Ben?"}]},
    ]
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 8
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    assert outputs[0].prompt.count("<|user|>") == 2
    conversations = [conversation for _ in range(10)]
    assert len(llm.chat(conversations, sampling_params, use_tqdm=True)) == 10
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    [custom] = llm.chat(conversation, sampling_params, use_tqdm=False, chat_template=template)
    assert custom.prompt.startswith("Where is Ida?\n")


def embed(tmp_path: Path) -> None:
    llm = LLM(model=MODEL, runner="pooling", enforce_eager=True)
    for _prompt, output in zip(PROMPTS, llm.embed(PROMPTS)):
        embeds = output.outputs.embedding
        assert len(embeds) == output.outputs.hidden_size == llm.model.config.hidden_size
        assert torch.tensor(embeds).norm().item() == pytest.approx(1, abs=1e-5)


def score(tmp_path: Path) -> None:
    llm = LLM(model=MODEL, runner="pooling", enforce_eager=True)
    outputs = llm.score("Where is the cat?", ["The cat is here.", "Seven and two are nine."])
    assert all(-1 <= output.outputs.score <= 1 for output in outputs)


class Animal(BaseModel):
    name: str
    legs: int


def structured_outputs(tmp_path: Path) -> None:
    llm = LLM(model=MODEL, max_model_len=200)

    def ask(**fields) -> str:
        params = SamplingParams(temperature=0.0, max_tokens=80, structured_outputs=StructuredOutputsParams(**fields))
        return llm.generate("Answer: ", sampling_params=params, **QUIET)[0].outputs[0].text

    assert ask(choice=["Positive", "Negative"]) in ("Positive", "Negative")
    assert re.fullmatch(r"\w{2,5}@\w{2,5}\.com", ask(regex=r"\w{2,5}@\w{2,5}\.com"))
    schema = Animal.model_json_schema() | {"additionalProperties": False}
    schema["properties"]["name"]["maxLength"], schema["properties"]["legs"]["maximum"] = 5, 99
    Animal.model_validate(json.loads(ask(json=schema)))
    sql = 'root ::= "SELECT " column " from table_1"\ncolumn ::= "col_1" | "col_2"'
    assert ask(grammar=sql) in ("SELECT col_1 from table_1", "SELECT col_2 from table_1")


def prefix_caching(tmp_path: Path) -> None:
    prefix = "You are a teacher. " * 12
    prompts = [prefix + prompt for prompt in PROMPTS]
    sampling_params = SamplingParams(temperature=0.0, max_tokens=6)
    regular = LLM(model=MODEL, enable_prefix_caching=False, gpu_memory_utilization=0.4)
    cached = LLM(model=MODEL, enable_prefix_caching=True, gpu_memory_utilization=0.4)
    expected = texts(regular.generate(prompts, sampling_params, **QUIET))
    cached.generate(prompts[0], sampling_params, **QUIET)
    outputs = cached.generate(prompts, sampling_params, **QUIET)
    assert texts(outputs) == expected and all(output.num_cached_tokens > 0 for output in outputs)


def automatic_prefix_caching(tmp_path: Path) -> None:
    table = "| id | name |\n" + "".join(f"| {row} | Ida |\n" for row in range(30))
    llm = LLM(model=MODEL, enable_prefix_caching=True)
    sampling_params = SamplingParams(temperature=0, max_tokens=4)
    first = llm.generate(table + "What is the name of 3?", sampling_params=sampling_params, **QUIET)
    second = llm.generate(table + "What is the name of 7?", sampling_params=sampling_params, **QUIET)
    assert first[0].metrics.num_cached_tokens == 0 < second[0].metrics.num_cached_tokens


def batch_invariance(tmp_path: Path) -> None:
    llm = LLM(model=MODEL, dtype="float32", max_num_seqs=8)
    sampling_params = SamplingParams(temperature=0.6, top_p=0.95, max_tokens=8, seed=7)
    alone = texts(llm.generate([PROMPTS[0]], sampling_params, **QUIET))
    for size in (2, 4):
        assert texts(llm.generate(PROMPTS[:size], sampling_params, **QUIET))[:1] == alone


def reproducibility(tmp_path: Path) -> None:
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    one, other = (LLM(model=MODEL, seed=42) for _ in range(2))
    assert texts(one.generate(PROMPTS, sampling_params, **QUIET)) == texts(
        other.generate(PROMPTS, sampling_params, **QUIET)
    )


def logits_processors(tmp_path: Path) -> None:
    llm = LLM(model=MODEL)
    target = 263

    def keep_the_target(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        kept = torch.full_like(logits, float("-inf"))
        kept[target] = logits[target]
        return kept

    params = [
        SamplingParams(temperature=0.0, max_tokens=4, logits_processors=[keep_the_target]),
        SamplingParams(temperature=0.0, max_tokens=4, extra_args={"target_token": target}),
    ]
    forced, free = (output.outputs[0].token_ids for output in llm.generate(PROMPTS[:2], params, **QUIET))
    assert forced == [target] * 4 != free


def skip_loading_weights_in_engine_init(tmp_path: Path) -> None:
    llm = LLM(model=MODEL, load_format="dummy", enforce_eager=True)
    params = SamplingParams(temperature=0.0)
    dummy = texts(llm.generate(PROMPTS, params, **QUIET))
    llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
    llm.collective_rpc("reload_weights")
    real = texts(llm.generate(PROMPTS, params, **QUIET))
    assert real != dummy and real == texts(LLM(model=MODEL).generate(PROMPTS, params, **QUIET))


def metrics(tmp_path: Path) -> None:
    llm = LLM(model=MODEL, disable_log_stats=False)
    llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95), **QUIET)
    kinds = {type(metric).__name__ for metric in llm.get_metrics()}
    assert kinds == {"Gauge", "Counter", "Histogram"}
    for metric in llm.get_metrics():
        if type(metric).__name__ == "Histogram":
            assert metric.count == len(PROMPTS) == metric.buckets["+Inf"] and metric.sum > 0


def simple_profiling(tmp_path: Path) -> None:
    llm = LLM(model=MODEL, profiler_config={"profiler": "torch", "torch_profiler_dir": str(tmp_path / "profile")})
    llm.start_profile()
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95), **QUIET)
    llm.stop_profile()
    assert texts(outputs) and [path.suffix for path in (tmp_path / "profile").iterdir()] == [".json"]


def llm_engine_example(tmp_path: Path) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=MODEL))
    left = [
        ("A robot may not", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("To be or not", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("What is the number", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
    ]
    request_id, finished = 0, []
    while left or engine.has_unfinished_requests():
        if left:
            prompt, sampling_params = left.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params)
            request_id += 1
        finished += [output for output in engine.step() if output.finished]
    assert {output.request_id: len(output.outputs) for output in finished} == {"0": 1, "1": 1, "2": 2}
    [scored] = [output for output in finished if output.request_id == "0"]
    assert len(scored.prompt_logprobs) == len(scored.prompt_token_ids) and scored.outputs[0].logprobs


def llm_engine_reset_kv(tmp_path: Path) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=MODEL))
    params = SamplingParams(temperature=0.0, max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY)
    found = []
    for request_id in ("0", "1"):
        engine.add_request(request_id, PROMPTS[0] * 8, params)
        while engine.has_unfinished_requests():
            found += engine.step()
        assert engine.reset_prefix_cache()
    assert [output.num_cached_tokens for output in found] == [0, 0]
    assert found[0].outputs[0].token_ids == found[1].outputs[0].token_ids


def spec_decode(tmp_path: Path) -> None:
    prompts = [{"prompt_token_ids": [5, 6, 7, 8] * 6}, TokensPrompt(prompt_token_ids=[9, 10] * 8)]
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    llm = LLM(model=MODEL, speculative_config=config, disable_log_stats=False, max_model_len=128, enforce_eager=False)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    drafted = llm.generate(prompts, sampling_params=params, **QUIET)
    assert texts(drafted) == texts(LLM(model=MODEL).generate(prompts, params, **QUIET))
    names = {metric.name for metric in llm.get_metrics()}
    assert {"vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos"} <= names


def chat_with_tools(tmp_path: Path) -> None:
    llm = LLM(model=MODEL)
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    call = {"id": "abc", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bonn"}'}}
    messages = [
        {"role": "user", "content": "What is the weather in Bonn?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "It is sunny.", "tool_call_id": "abc"},
    ]
    outputs = llm.chat(messages, sampling_params=SamplingParams(max_tokens=8, temperature=0.0), tools=tools, **QUIET)
    assert texts(outputs) and "It is sunny." in outputs[0].prompt


def batch_llm_inference(tmp_path: Path) -> None:
    llm = LLM(model=MODEL, enable_chunked_prefill=True, max_num_batched_tokens=64, max_model_len=256)
    params = [SamplingParams(temperature=0.3, max_tokens=5, seed=index) for index in range(len(PROMPTS))]
    outputs = llm.generate([TextPrompt(prompt=prompt) for prompt in PROMPTS], params, **QUIET)
    assert [output.prompt for output in outputs] == PROMPTS


def beam_search(tmp_path: Path) -> None:
    llm = LLM(model=MODEL)
    outputs = llm.beam_search([{"prompt": prompt} for prompt in PROMPTS], BeamSearchParams(beam_width=3, max_tokens=5))
    for prompt, output in zip(PROMPTS, outputs):
        assert len(output.sequences) == 3 and output.sequences[0].text.startswith(prompt)
        scores = [sequence.cum_logprob for sequence in output.sequences]
        assert scores == sorted(scores, reverse=True)


def sleep_mode(tmp_path: Path) -> None:
    llm = LLM(model=MODEL, enable_sleep_mode=True)
    before = texts(llm.generate(PROMPTS, SamplingParams(temperature=0.0), **QUIET))
    for level in (1, 2):
        llm.sleep(level=level)
        llm.wake_up(tags=["weights"])
        llm.wake_up(tags=["kv_cache"])
        assert texts(llm.generate(PROMPTS, SamplingParams(temperature=0.0), **QUIET)) == before


def prompt_logprobs_of_a_score(tmp_path: Path) -> None:
    """What evaluation harnesses ask: how probable the model finds a text, and which of two labels comes next."""
    llm = LLM(model=MODEL)
    tokenizer = llm.get_tokenizer()
    ids = tokenizer(PROMPTS[0])["input_ids"]
    [output] = llm.generate([ids], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1), **QUIET)
    scored = [row[token] for token, row in zip(ids, output.prompt_logprobs) if row is not None]
    assert len(scored) == len(ids) - 1 and all(entry.logprob <= 0 for entry in scored)
    labels = [tokenizer.encode(word, add_special_tokens=False)[0] for word in (" yes", " no")]
    params = SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=labels)
    assert set(labels) <= set(llm.generate(PROMPTS[0], params, **QUIET)[0].outputs[0].logprobs[0])


def multilora_inference(tmp_path: Path) -> None:
    lora_path = str(save_adapter(zoo.bundled()[MODEL], tmp_path / "sql", seed=1, r=8))
    engine_args = EngineArgs(
        model=MODEL, enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2, max_num_seqs=256
    )
    engine = LLMEngine.from_engine_args(engine_args)
    test_prompts: list[tuple[str, SamplingParams, LoRARequest | None]] = [
        ("A robot may not injure a human being", SamplingParams(temperature=0.0, max_tokens=12), None),
        ("Once upon a time", SamplingParams(temperature=0.0, max_tokens=12), LoRARequest("sql-lora", 1, lora_path)),
        ("Once upon a time", SamplingParams(temperature=0.0, max_tokens=12), LoRARequest("sql-lora2", 2, lora_path)),
    ]
    request_id, outputs = 0, {}
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params, lora_request = test_prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params, lora_request=lora_request)
            request_id += 1
        request_outputs: list[RequestOutput] = engine.step()
        outputs |= {output.request_id: output for output in request_outputs if output.finished}
    assert outputs["1"].outputs[0].text == outputs["2"].outputs[0].text
    assert outputs["1"].lora_request.lora_name == "sql-lora" and outputs["0"].lora_request is None


PROGRAMS = [
    basic, generate, chat, embed, score, structured_outputs, prefix_caching, automatic_prefix_caching, batch_invariance,
    reproducibility, logits_processors, skip_loading_weights_in_engine_init, metrics, simple_profiling,
    llm_engine_example, llm_engine_reset_kv, spec_decode, chat_with_tools, batch_llm_inference, beam_search, sleep_mode,
    prompt_logprobs_of_a_score, multilora_inference,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_of_vllm_runs(program, tmp_path):
    program(tmp_path)


# vLLM's file -> what its program asks for, and what the refusal says.
REFUSED = {
    "classify": (lambda llm: llm.classify(PROMPTS), AttributeError, "no classifier"),
    "reward": (lambda llm: llm.reward(PROMPTS), AttributeError, "no reward head"),
    "torchrun_example": (
        lambda llm: LLM(MODEL, distributed_executor_backend="external_launcher"), ValueError, "allowed: mp, ray",
    ),
    "data_parallel": (lambda llm: LLM(MODEL, data_parallel_size=2), NotImplementedError, "make several LLMs"),
    "context_extension": (
        lambda llm: LLM(MODEL, hf_overrides={"rope": {}}), NotImplementedError, "no configuration overridden",
    ),
    "prompt_embed_inference": (
        lambda llm: llm.generate({"prompt_embeds": torch.zeros(3, 8)}), NotImplementedError, "text or token ids",
    ),
    "vision_language": (
        lambda llm: llm.generate({"prompt": "a", "multi_modal_data": {"image": 1}}), NotImplementedError, "serves text",
    ),
    "custom_logits_processor_class": (
        lambda llm: LLM(MODEL, logits_processors=[object]), NotImplementedError, "SamplingParams(logits_processors=",
    ),
    "save_sharded_state": (
        lambda llm: llm.collective_rpc("save_sharded_state"), NotImplementedError, "give a function",
    ),
    "kv_transfer": (lambda llm: LLM(MODEL, kv_transfer_config={"a": 1}), NotImplementedError, "kv_offloading_size"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_program_that_cannot_run_is_refused_with_a_reason(llm, name):
    call, error, told = REFUSED[name]
    with pytest.raises(error) as raised:
        call(llm)
    assert told in str(raised.value), raised.value
