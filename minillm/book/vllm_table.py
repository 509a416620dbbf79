"""What becomes of each of vLLM's names in minillm: the same, different, or absent and why. Built in chapter 91.

`ROWS` is the one list, of vLLM 0.32; chapters/91_glossary.ipynb shows it as a table. What is absent is read from the
modules that refuse it, so that the table says what the error says.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Literal, NamedTuple

from minillm.book.chips import Html
from minillm.engine import pooling, upkeep, vllm_absent
from minillm.sampling import absent
from minillm.sampling.checks import Absent

How = Literal["same", "differs", "absent", "own"]
COLUMNS = {"of vLLM": 26, "in minillm": 10, "how, or why not": 64}  # width in percent


class Row(NamedTuple):
    owner: str  # the class of vLLM's
    name: str  # its field, keyword or method
    how: How  # "own" is a name that vLLM does not have
    told: str = ""


_NONE = "differs: always None"
# Owner -> name -> "" for the same, or "differs: how", or "own: what". Several names may share a line.
_THERE: dict[str, dict[str, str]] = {
    "SamplingParams": {
        "n frequency_penalty presence_penalty top_p top_k min_p seed stop_token_ids ignore_eos min_tokens": "",
        "max_tokens prompt_logprobs logprob_token_ids structured_outputs allowed_token_ids bad_words": "",
        "detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind": "",
        "repetition_penalty": "differs: from 0.01 to 100",
        "temperature": "differs: up to 1000; values below 0.01 are not raised",
        "stop": "differs: of several the one that completes first ends the text",
        "logprobs": "differs: no limit to their number",
        "logit_bias": "differs: values outside -100 to 100 are refused; from_optional cuts them",
        "extra_args": "differs: kept, and read by nothing",
        "logits_processors": "differs: vLLM's first engine had them; functions (output token ids, logits) -> logits",
    },
    "StructuredOutputsParams": {
        "json regex choice json_object disable_additional_properties whitespace_pattern": "",
        "grammar": "differs: Lark, or EBNF as GBNF writes it",
        "structural_tag": "differs: lists of structures and triggers; no format",
        "disable_any_whitespace": "differs: without it there is one space behind each comma and colon",
        "jump_forward": "own: write text that is forced without asking the model for it",
        "after thinking_token_budget": "own: the grammar begins behind it, free text ends after so many tokens",
        "begin": "own: the text that the first tokens must begin with (token healing)",
    },
    "BeamSearchParams": {
        "beam_width max_tokens ignore_eos length_penalty include_stop_str_in_output skip_special_tokens": ""
    },
    "PoolingParams": {
        "dimensions": "",
        "use_activation": "differs: token_embed is of length 1 only where it is asked for",
        "task": "differs: embed and token_embed",
    },
    "LLM and EngineArgs": {
        "model enforce_eager seed max_model_len max_num_seqs max_num_batched_tokens tokenizer chat_template": "",
        "generation_config override_generation_config num_gpu_blocks_override cpu_offload_gb spec_method": "",
        "spec_model spec_tokens async_scheduling kv_offloading_size enable_chunked_prefill": "",
        "tensor_parallel_size pipeline_parallel_size enable_expert_parallel": "",
        "dtype": 'differs: "auto" is float32 on a CPU, and float16 on a GPU below sm_80',
        "block_size": "differs: any number from 1 on; 16 unless given",
        "gpu_memory_utilization": "differs: 0.9 unless given",
        "enable_prefix_caching": "differs: True unless given",
        "enable_lora": "",
        "max_loras": "differs: 8 unless given",
        "max_lora_rank": "differs: any number from 1 to 64; 16 unless given",
        "max_cpu_loras": "differs: four times max_loras unless given",
        "scheduling_policy": "differs: fcfs and priority, and also preemptive_priority, sjf, fair and lpm",
        "attention_backend": "differs: auto, torch, native and triton",
        "kv_cache_dtype": "differs: auto, int8, fp8 and int4",
        "quantization": "differs: quantizes a plain checkpoint by name; one that comes quantized says so itself",
        "speculative_config": "differs: ngram, draft_model, eagle and eagle3",
        "distributed_executor_backend": "differs: mp, also for one process, and ray",
        "load_format": "differs: auto, safetensors, gguf and dummy; the files themselves say which they are",
        "runner convert": "differs: one LLM generates and embeds",
        "max_logprobs": "differs: there is no limit to be raised",
        "disable_log_stats": "differs: outputs have their metrics either way",
        "enable_sleep_mode": "differs: every LLM can sleep",
        "pooler_config": "differs: a dictionary with pooling_type LAST or MEAN, and use_activation",
        "profiler_config": "differs: a dictionary with torch_profiler_dir",
        "swap_space": "differs: taken; host_kv_bytes with preemption_mode='swap' is what swaps",
        "device": "differs: vLLM had it once; auto, cpu or cuda",
        "num_kv_blocks": "own: blocks of the KV cache",
        "preemption_mode": "own: recompute or swap",
        "kv_retention": "own: keep the first and the last tokens of a text alone",
        "host_kv_bytes disk_kv_path disk_kv_bytes": "own: tiers of the KV cache in host memory and on disk",
        "cpu_offload_bytes": "own: cpu_offload_gb in bytes",
    },
    "LLM's methods": {
        "get_tokenizer get_default_sampling_params get_metrics from_engine_args apply_model get_world_size": "",
        "generate": "differs: with user=; tokenization_kwargs and mm_processor_kwargs are refused",
        "chat": "differs: from priority on by name; content in parts is text",
        "beam_search": "differs: one prompt after the other; the fields of BeamSearchParams may be given by name",
        "encode": "differs: token_embed unless pooling_task says embed; one prompt after the other",
        "embed": "differs: one prompt after the other, of any decoder",
        "score": "differs: the cosine of two vectors; no cross-encoder",
        "collective_rpc": "differs: without workers a function gets the LLM; of their methods there is reload_weights",
        "start_profile": "differs: records the engine's steps",
        "stop_profile": "differs: writes a file for Perfetto, and returns its path",
        "reset_prefix_cache": "differs: reset_running_requests aborts them; a disk tier keeps its files",
        "sleep": "differs: level 1 leaves the weights where they are; mode is abort",
        "wake_up": "differs: loads the weights again if level 2 freed them",
        "stream": "own: one prompt's tokens as they come",
        "submit step": "own: requests beside each other, stepped by the caller",
        "save_prefix_cache load_prefix_cache": "own: the cached blocks as a file",
        "is_sleeping": "own: as LLMEngine has it",
        "reload_weights": "own: in the place of collective_rpc",
        "add_lora remove_lora list_loras pin_lora": "own: as LLMEngine has them",
        "close shutdown": "own: end what is under way; also at the end of `with LLM(...) as llm:`",
        "one_request chat_requests step_once": "own: for callers that bring a thread of their own",
    },
    "RequestOutput": {
        "request_id prompt prompt_token_ids prompt_logprobs outputs finished num_cached_tokens": "",
        "metrics": "differs: always there, with the names of vLLM's engines of both generations",
        "lora_request": "",
        "encoder_prompt encoder_prompt_token_ids": f"{_NONE}: the book serves decoders alone",
        "kv_transfer_params ec_transfer_params": f"{_NONE}: replicas hand requests over themselves",
        "num_cache_creation_tokens": f"{_NONE}: every full block is cached",
        "prompt_token_id_logprobs": f"{_NONE}: {absent.PARAMS['prompt_logprob_token_ids'].why}",
    },
    "CompletionOutput": {
        "index text token_ids cumulative_logprob logprobs stop_reason": "",
        "finish_reason": 'differs: "error" too, for a grammar or a function that could not go on',
        "lora_request": "",
        "routed_experts": f"{_NONE}: routed experts are not reported",
        "sampling_mask": f"{_NONE}: the tokens that the filters kept are not reported",
        "spec_decode_metrics": f"{_NONE}: num_drafted_tokens and num_accepted_tokens are in the request's metrics",
        "weight_versions": f"{_NONE}: the weights of an LLM do not change",
        "error": "own: what went wrong",
    },
}
_ABSENT: dict[str, Mapping[str, Absent | str]] = {
    "SamplingParams": absent.PARAMS,
    "StructuredOutputsParams": absent.STRUCTURED,
    "BeamSearchParams": absent.BEAM,
    "PoolingParams": pooling.ABSENT,
    "LLM and EngineArgs": vllm_absent.KEYWORDS,
    "LLM's methods": upkeep.ABSENT,
}


def _rows() -> Iterator[Row]:
    for owner, entries in _THERE.items():
        for names, text in entries.items():
            how, _, told = text.partition(": ")
            for name in names.split():
                yield Row(owner, name, how or "same", told)
        for name, why in _ABSENT.get(owner, {}).items():
            yield Row(owner, name, "absent", why if isinstance(why, str) else why.why)


ROWS = list(_rows())


def show_vllm_table(owner: str = "", how: str = "") -> Html:
    """The rows of one class, or of one fate ("same", "differs", "absent", "own"); all of them by default. Names that
    share a class, a fate and a reason share a line."""
    found = [row for row in ROWS if owner in ("", row.owner) and how in ("", row.how)]
    if not found:
        owners = ", ".join(dict.fromkeys(row.owner for row in ROWS))
        text = f"no row has owner={owner!r} and how={how!r}; the owners are {owners}"
        return Html(f"<p>{html.escape(text)}</p>", text)
    cell = "padding:3px 8px;border-bottom:1px solid #e6e9ed;text-align:left;vertical-align:top;white-space:normal"
    head = "".join(f'<th style="{cell};width:{width}%">{column}</th>' for column, width in COLUMNS.items())
    lines, words = [f"<tr>{head}</tr>"], []
    for title, of_title in groupby(found, key=lambda row: row.owner):
        rows = list(of_title)
        counts = Counter(row.how for row in rows)
        summary = f"{title}: {', '.join(f'{count} {how}' for how, count in counts.items())}"
        lines.append(f'<tr><th colspan="3" style="{cell};background:#f6f8fa">{html.escape(summary)}</th></tr>')
        words.append(summary)
        for (fate, told), some in groupby(rows, key=lambda row: (row.how, row.told)):
            names = [row.name for row in some]
            shown = ", ".join(f'<code style="white-space:normal">{_breaking(name)}</code>' for name in names)
            cells = (shown, fate, html.escape(told, quote=False))
            lines.append("<tr>" + "".join(f'<td style="{cell}">{text}</td>' for text in cells) + "</tr>")
            words.append(f"  {', '.join(names)} [{fate}]" + (f" {told}" if told else ""))
    table = "font:13px sans-serif;border-collapse:collapse;background:#fff;color:#24292f;width:100%;table-layout:fixed"
    return Html(f'<table style="{table}">{"".join(lines)}</table>', "\n".join(words))


def _breaking(name: str) -> str:
    """A long name may break behind an underscore."""
    return html.escape(name).replace("_", "_<wbr>")
