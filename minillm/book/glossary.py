"""The field's words: what each means here, in vLLM, in SGLang and in the papers. Built in chapter 91.

`TERMS` is the one list; chapters/91_glossary.ipynb shows it as a table.
"""
from __future__ import annotations

import html
import re
from dataclasses import astuple, dataclass

from minillm.book.chips import Html
from minillm.book.paths import notebooks

COLUMNS = {"term": 14, "meaning": 28, "vLLM": 20, "SGLang": 20, "papers": 13, "ch.": 5}   # width in percent
CHAPTERS = range(26)   # the numbered chapters of the book, without the appendix


@dataclass(frozen=True)
class Term:
    """One word of ours, in one sentence, with the names others use; `code` stands between backticks, "" is no name.

    chapter: where the word is explained.
    """

    name: str
    meaning: str
    vllm: str
    sglang: str
    papers: str
    chapter: int


def show_glossary(search: str = "") -> Html:
    """The terms that hold `search` anywhere, under any of their names; all of them by default."""
    found = find(search)
    if not found:
        text = f"no term holds {search!r}; the glossary has {len(TERMS)} terms"
        return Html(f"<p>{html.escape(text)}</p>", text)
    cell = "padding:3px 8px;border-bottom:1px solid #e6e9ed;text-align:left;vertical-align:top;white-space:normal"
    lines = ["<tr>" + "".join(f'<th style="{cell};width:{width}%">{column}</th>' for column, width in COLUMNS.items()) + "</tr>"]
    for term in found:
        name, *others = (_marked(text) for text in (term.name, term.meaning, term.vllm, term.sglang, term.papers))
        cells = [f"<b>{name}</b>", *others, _chapter_link(term.chapter)]
        lines.append("<tr>" + "".join(f'<td style="{cell}">{text}</td>' for text in cells) + "</tr>")
    table = "font:13px sans-serif;border-collapse:collapse;background:#fff;color:#24292f;width:100%;table-layout:fixed"
    return Html(f'<table style="{table}">{"".join(lines)}</table>', "\n".join(_in_words(term) for term in found))


def find(search: str) -> list[Term]:
    """The terms in which `search` occurs, whatever the case, in any field."""
    return [term for term in TERMS if search.lower() in " | ".join(map(str, astuple(term))).lower()]


def _marked(text: str) -> str:
    """Backticks become code; a long identifier may break after a punctuation mark or before a capital."""
    text = re.sub(r"`([^`]+)`", r'<code style="white-space:normal">\1</code>', html.escape(text, quote=False))
    return re.sub(r"[\w.:]{20,}", lambda long: re.sub(r"(?<=[a-z])([_.:])|(?<=[a-z])(?=[A-Z])", r"\1<wbr>", long[0]), text) or "–"


def _chapter_link(chapter: int) -> str:
    """The chapter's number, as a link once its notebook is there."""
    try:
        file = next((path for path in notebooks("chapters") if path.name.startswith(f"{chapter:02d}_")), None)
    except FileNotFoundError:   # the package was installed without the book
        file = None
    return f'<a href="{file.name}">{chapter:02d}</a>' if file else f"{chapter:02d}"


def _in_words(term: Term) -> str:
    others = {"vLLM": term.vllm, "SGLang": term.sglang, "papers": term.papers}
    names = "; ".join(f"{who}: {text}" for who, text in others.items() if text)
    return f"{term.name} [{term.chapter:02d}] {term.meaning}" + (f" ({names})" if names else "")


TERMS = [
    Term("acceptance rate", "Share of the drafted tokens that the target keeps; α divides by those that were looked at.",
         "`vllm:spec_decode_num_accepted_tokens`", "`avg_spec_accept_length`", "α (Leviathan et al., 2023)", 18),
    Term("activation outlier", "A channel whose activations are many times the rest; it stretches an 8-bit grid for all of them.",
         "", "", "outlier feature (LLM.int8())", 16),
    Term("ageing", "Priority that grows with waiting, so that nobody waits for ever.", "", "", "", 9),
    Term("all-reduce", "Every device gets the sum of what all hold.", "", "", "", 20),
    Term("arithmetic intensity", "FLOPs done for each byte moved; it decides whether memory or arithmetic is the limit.",
         "", "", "operational intensity (Roofline)", 4),
    Term("attention backend", "The code that computes attention over the cache; exchanged without touching the model.",
         "`AttentionBackend`", "`AttentionBackend`, `--attention-backend`", "", 2),
    Term("attention sink", "The first tokens, which heads keep looking at; without them perplexity explodes.", "", "", "StreamingLLM", 17),
    Term("AWQ", "Channels that matter are scaled up before rounding, found from activations.",
         '`quantization="awq"`', "`--quantization awq`", "Lin et al., 2023", 16),
    Term("batch invariance", "A row's result does not depend on what else is in the batch, to the last bit.",
         "`VLLM_BATCH_INVARIANT`", "`--enable-deterministic-inference`", "", 4),
    Term("beam search", "Keeps the b most probable unfinished texts at every step.", "`LLM.beam_search`, `BeamSearchParams`", "", "", 1),
    Term("block", "A fixed number of places for tokens in the KV cache: the unit that is handed out and shared.",
         "`KVCacheBlock`", "page", "KV block (PagedAttention)", 6),
    Term("block_size", "Places for tokens in one block.", "`block_size`", "`--page-size`", "block size B", 6),
    Term("block_table", "For each sequence, the ids of its blocks, in order.",
         "`block_table`", "`req_to_token`, one entry a token", "block table", 6),
    Term("BlockPool", "All blocks: which are free, and which are cached under which hash.",
         "`BlockPool`, `FreeKVCacheBlockQueue`", "`TokenToKVPoolAllocator`", "", 6),
    Term("bucket", "One of a few batch sizes to which a step is padded, so that a captured graph fits.",
         "`cudagraph_capture_sizes`", "`--cuda-graph-bs`", "", 14),
    Term("calibration", "Running sample text to see what the activations look like, before quantizing.", "", "", "", 16),
    Term("cascade attention", "A prefix that a batch shares is attended to once for all, the rest for each, and both are merged.",
         "`use_cascade_attention`", "", "Hydragen", 13),
    Term("causal mask", "Position i looks at positions up to i only.", "`causal`", "", "", 2),
    Term("chunked prefill", "A long prompt is computed in pieces, in steps that also serve other requests.",
         "`enable_chunked_prefill`", "`--chunked-prefill-size`", "Sarathi-Serve", 8),
    Term("continuous batching", "Requests join and leave the batch at every step, not when the whole batch is done.",
         "continuous batching", "continuous batching", "iteration-level scheduling (Orca)", 5),
    Term("copy-on-write", "A shared block is copied when one of its owners is about to write into it.",
         "none in V1: only full blocks are shared", "", "copy-on-write (PagedAttention)", 6),
    Term("cu_seqlens", "FlashAttention's name for `query_start_loc`.", "`cu_seqlens_q`", "`cu_seqlens_q`", "", 4),
    Term("CUDA graph", "A recorded sequence of kernel launches, replayed with one call.",
         "`cudagraph_mode`, `enforce_eager`", "`--disable-cuda-graph`", "", 14),
    Term("data parallel", "Whole copies of the model on several devices, each with its own requests.",
         "`data_parallel_size`", "`--dp-size`", "", 22),
    Term("decode", "A step in which a request has one token left to compute, its newest.",
         "no phase of its own", "`ForwardMode.DECODE`", "increment phase (Orca)", 3),
    Term("dequantize", "Back from a small integer to a number: (q − zero point) × scale.", "", "", "", 15),
    Term("detokenizer", "Turns token ids into text as they come, never showing half a character.",
         "`IncrementalDetokenizer`", "`DetokenizerManager`", "", 1),
    Term("disaggregated prefill", "Prefill and decode on different machines; the cache travels between them.",
         "`kv_transfer_config`", "`--disaggregation-mode`", "DistServe, Splitwise", 22),
    Term("draft model", "A small model that proposes tokens for a large one to verify.",
         '`speculative_config={"model": ...}`', "`--speculative-draft-model-path`", "approximation model (Leviathan et al.)", 18),
    Term("E2E latency", "Time from a request's arrival to its last token.",
         "`vllm:e2e_request_latency_seconds`", "`sglang:e2e_request_latency_seconds`", "", 8),
    Term("EOS", "The token that ends a text; a model may have several.", "`ignore_eos`", "`ignore_eos`", "", 1),
    Term("expert parallel", "The experts of a layer lie on different devices, and tokens travel to theirs.",
         "`enable_expert_parallel`", "`--ep-size`", "", 21),
    Term("extend", "SGLang's word for computing tokens behind those already cached; a prefill is the case with none cached.",
         "no phase of its own", "`ForwardMode.EXTEND`", "", 7),
    Term("fair share", "Users take turns by the tokens they have received, not by the requests they have sent.",
         "", "", "virtual token counter (VTC)", 9),
    Term("FCFS", "First come, first served.", '`scheduling_policy="fcfs"`', "`--schedule-policy fcfs`", "", 5),
    Term("finish_reason", 'Why a text ended: "stop", "length" or "abort".',
         "`finish_reason`", "`FINISH_LENGTH`, `FINISH_MATCHED_STR`, ...", "", 1),
    Term("FlashAttention", "Attention tile by tile with a running softmax; the n × n scores are never stored.",
         "`FlashAttentionBackend`", "`--attention-backend fa3`", "Dao et al., 2022", 12),
    Term("ForwardBatch", "One step as one flat list of tokens, with the tables that attention needs.",
         "`CommonAttentionMetadata`", "`ForwardBatch`", "", 2),
    Term("FP8", "Floats of 8 bits: e4m3 has finer steps, e5m2 more range.",
         '`quantization="fp8"`', "`--quantization fp8`", "Micikevicius et al., 2022", 15),
    Term("fragmentation", "Memory held and unused: reserved ahead, left over inside a block, or lost between allocations.",
         "", "", "reserved, internal, external (PagedAttention)", 6),
    Term("fusion", "Several operations in one kernel, so that what lies between them never goes to memory.", "", "", "", 10),
    Term("GGUF", "llama.cpp's file format: weights in small blocks, each with its scales.",
         '`quantization="gguf"`', "`--quantization gguf`", "", 15),
    Term("goodput", "Requests a second that meet their latency targets.", "`vllm bench serve --goodput`", "", "DistServe", 8),
    Term("GPTQ", "Rounds weight after weight and lets the rest make up for each error.",
         '`quantization="gptq"`', "`--quantization gptq`", "Frantar et al., 2022", 16),
    Term("gpu_memory_utilization", "Share of the device's memory that the engine may fill.",
         "`gpu_memory_utilization`", "`--mem-fraction-static`, weights and cache only", "", 6),
    Term("GQA", "Grouped-query attention: several query heads share one head of keys and values.",
         "`num_kv_heads`", "`num_key_value_heads`", "Ainslie et al., 2023", 2),
    Term("grammar", "Rules for the output (regular expression, JSON schema, EBNF), compiled into an automaton.",
         "`StructuredOutputGrammar`", "`--grammar-backend`", "", 19),
    Term("greedy decoding", "Always the most probable token.", "`temperature=0`", '`"temperature": 0`', "", 1),
    Term("group size", "How many neighbouring weights share one scale.", "`group_size`", "`group_size`", "", 15),
    Term("Gumbel-max", "The argmax of logits plus Gumbel noise is a draw from their softmax.",
         "`random_sample`, as an exponential race", "`multinomial_with_seed`", "Maddison et al., 2014", 1),
    Term("head_dim", "Width of one attention head.", "`head_size`", "`head_dim`", "d_k", 2),
    Term("Hessian", "Here XᵀX of a product's inputs: how they vary together; it turns errors of weights into errors of outputs.", "", "", "H (GPTQ)", 16),
    Term("hit rate", "Share of the prompt tokens that the prefix cache already holds.",
         "`vllm:prefix_cache_hits` over `_queries`", "`sglang:cache_hit_rate`", "", 7),
    Term("host tier", "Blocks kept in host memory or on disk, and fetched back.",
         "`OffloadingConnector`", "HiCache, `--enable-hierarchical-cache`", "", 17),
    Term("ISL, OSL", "Input and output sequence length of a workload, in tokens.", "`--random-input-len`", "`--random-input-len`", "", 8),
    Term("iteration-level scheduling", "Orca's name for what makes continuous batching: a decision at every step.", "", "", "Orca", 5),
    Term("ITL", "Inter-token latency: time between two tokens of one stream; its tail is what a reader sees as stutter.",
         "`vllm:inter_token_latency_seconds`", "`sglang:inter_token_latency_seconds`", "TBT (Sarathi-Serve)", 8),
    Term("jump-forward", "Text that the grammar leaves no choice about is appended without asking the model.",
         "", "`try_jump_forward`", "compressed finite state machine (SGLang)", 19),
    Term("KV cache", "Keys and values of all tokens computed so far, for every layer.", "`kv_caches`", "`MHATokenToKVPool`", "", 3),
    Term("KV cache quantization", "Keys and values held in 8 bits or fewer.",
         '`kv_cache_dtype="fp8"`', "`--kv-cache-dtype fp8_e4m3`", "KIVI, KVQuant", 17),
    Term("KVCacheManager", "Gives a request its blocks: `get_computed_blocks`, `allocate_slots`, `free`.",
         "`KVCacheManager`", "`RadixCache` and `TokenToKVPoolAllocator`", "KV cache manager (PagedAttention)", 6),
    Term("Little's law", "Requests inside = arrivals a second × time inside.", "", "", "Little, 1961", 8),
    Term("LLM.int8()", "The few huge inputs of a product stay in 16 bits, all others are multiplied in int8.", '`quantization="bitsandbytes"`', "",
         "Dettmers et al., 2022", 16),
    Term("logit", "A token's score before the softmax.", "`logits`", "`next_token_logits`", "", 1),
    Term("logprob", "Logarithm of a token's probability.", "`logprobs`", "`return_logprob`, `top_logprobs_num`", "", 1),
    Term("LoRA adapter", "A low-rank correction to the weights, chosen by the request.",
         "`lora_request`", "`lora_path`", "Hu et al., 2021", 23),
    Term("LRU", "Least recently used: which cached block is given up first.",
         "`FreeKVCacheBlockQueue`", "`--radix-eviction-policy lru`", "", 7),
    Term("max_model_len", "Longest sequence, prompt and output together.", "`max_model_len`", "`--context-length`", "", 3),
    Term("max_num_batched_tokens", "The token budget of one step.",
         "`max_num_batched_tokens`", "`--max-prefill-tokens`, `--chunked-prefill-size`", "", 5),
    Term("max_num_seqs", "How many requests may run at a time.", "`max_num_seqs`", "`--max-running-requests`", "", 5),
    Term("MBU", "Memory bandwidth utilisation: bytes that must move ÷ time ÷ the machine's bandwidth.", "", "", "Databricks, 2023", 4),
    Term("MFU", "Model FLOPs utilisation: FLOPs the model needs ÷ time ÷ the machine's rate.", "", "", "PaLM, 2022", 4),
    Term("MHA", "Multi-head attention: every query head has keys and values of its own.",
         "", "`MHATokenToKVPool`", "Vaswani et al., 2017", 2),
    Term("min-p", "Keeps tokens with at least m times the probability of the best.", "`min_p`", "`min_p`", "Nguyen et al., 2024", 1),
    Term("MLA", "Multi-head latent attention: the cache holds one compressed vector a token, not keys and values.",
         "`MLACommonBackend`", "`MLATokenToKVPool`", "DeepSeek-V2", 2),
    Term("MoE", "Mixture of experts: each token passes through a few of many feed-forward networks.", "`FusedMoE`", "`FusedMoE`", "", 21),
    Term("MQA", "Multi-query attention: all query heads share one head of keys and values.", "", "", "Shazeer, 2019", 2),
    Term("n-gram lookup", "Drafts copied from where the last few tokens stood before in the text.",
         "`NgramProposer`", "`--speculative-algorithm NGRAM`", "prompt lookup decoding", 18),
    Term("nucleus sampling", "The paper's name for top-p.", "`top_p`", "`top_p`", "Holtzman et al., 2020", 1),
    Term("num_computed_tokens", "How many tokens of a request are computed; the scheduler lets it catch up with `num_tokens`.",
         "`num_computed_tokens`", "`prefix_indices`, their number", "", 5),
    Term("occupancy", "Share of the warps that an SM could hold at a time that a kernel fills.", "", "", "", 11),
    Term("online softmax", "Softmax over pieces, with a running maximum and sum that are corrected on the way.",
         "", "", "Milakov and Gimelshein, 2018", 12),
    Term("overlap scheduling", "The CPU prepares step n + 1 while the GPU computes step n.",
         "`async_scheduling`", "`event_loop_overlap`", "", 14),
    Term("P99", "What 99 of 100 measurements stay below: the slow tail, which a mean hides.", "", "", "", 8),
    Term("padding", "Dummy tokens that fill short sequences up to a rectangle: work for nothing.", "", "", "", 4),
    Term("page", "SGLang's word for block.", "block", "`--page-size`", "page (operating systems)", 6),
    Term("PagedAttention", "Attention that reads keys and values through a block table.", "PagedAttention", "", "Kwon et al., 2023", 13),
    Term("penalty", "Lowers the logits of tokens that were used before: presence, frequency or repetition.",
         "`presence_penalty`, ...", "`presence_penalty`, ...", "repetition: CTRL, 2019", 1),
    Term("perplexity", "exp of the mean surprise in nats: between how many equally likely tokens the model hesitates.", "", "", "", 1),
    Term("pipeline parallel", "Layers lie on different devices, and batches flow through them.",
         "`pipeline_parallel_size`", "`--pp-size`", "GPipe", 20),
    Term("preemption", "A running request gives its blocks back and waits again.",
         "`RequestStatus.PREEMPTED`", "retraction, `retract_decode`", "", 6),
    Term("prefill", "Computing a prompt's tokens, many in one step.",
         "no phase of its own", "`ForwardMode.EXTEND`", "initiation phase (Orca)", 3),
    Term("prefix cache", "Blocks of earlier prompts, found again by a hash of everything up to their end.",
         "`enable_prefix_caching`, `BlockHash`", "`RadixCache`", "RadixAttention (SGLang)", 7),
    Term("program", "Triton: one instance of a kernel, working on one tile.", "", "", "thread block (CUDA)", 10),
    Term("program of prompts", "Text and model calls in turns, over one prefix cache.", "", "`gen`, `select`, `fork`", "SGLang", 19),
    Term("quantization", "Numbers in few bits: small integers or floats, and a scale that several share.",
         "`quantization`", "`--quantization`", "", 15),
    Term("query_start_loc", "Where each request's tokens begin in the flat batch; one entry more than requests.",
         "`query_start_loc`", "`extend_start_loc`, `qo_indptr`", "cu_seqlens (FlashAttention)", 4),
    Term("radix node", "A stretch of tokens in SGLang's prefix tree, with the slots of their cache.",
         "a chain of `BlockHash`", "`TreeNode`", "radix tree (SGLang)", 7),
    Term("ragged batch", "Sequences of different lengths one behind the other, without padding; also called varlen.",
         "", "", "varlen (FlashAttention)", 4),
    Term("recompute", "Preemption that drops the cache and computes it again.",
         "the only way in V1", "`retract_decode`", "recomputation (PagedAttention)", 6),
    Term("ref_cnt", "How many requests use a block; at 0 it may be given to another.",
         "`KVCacheBlock.ref_cnt`", "`TreeNode.lock_ref`", "reference count", 6),
    Term("rejection sampling", "Keeps or replaces drafted tokens such that the target's distribution is exactly preserved.",
         "`RejectionSampler`", "`tree_speculative_sampling_target_only`", "speculative sampling (Chen et al., 2023)", 18),
    Term("request", "One prompt on its way to one or several outputs.", "`Request`, `request_id`", "`Req`, `rid`", "", 5),
    Term("request status", "WAITING, RUNNING, PREEMPTED or FINISHED.", "`RequestStatus`", "`waiting_queue`, `running_batch`", "", 5),
    Term("ridge point", "The arithmetic intensity at which the limit changes from memory to arithmetic.",
         "", "", "ridge point (Roofline)", 4),
    Term("ring attention", "Each device holds a piece of one long sequence, and keys and values travel round.",
         "", "", "Liu et al., 2023", 20),
    Term("RMSNorm", "Divides a vector by its root mean square, then scales each channel.",
         "`RMSNorm`", "`RMSNorm`", "Zhang and Sennrich, 2019", 2),
    Term("roofline", "The rate that bandwidth and arithmetic allow, against arithmetic intensity.", "", "", "Williams et al., 2009", 4),
    Term("RoPE", "Rotary position embedding: queries and keys turn by an angle that grows with their position.",
         "`get_rope`", "`get_rope`", "Su et al., 2021", 2),
    Term("RTN", "Round to nearest: quantization without calibration.", "", "", "RTN (GPTQ)", 15),
    Term("scale, zero point", "The distance between two marks of a grid, and the mark that stands for 0.",
         "`scales`, `qzeros`", "`scales`, `qzeros`", "", 15),
    Term("SchedulerOutput", "What one step shall compute: which requests, how many tokens of each, in which blocks.",
         "`SchedulerOutput`", "`ScheduleBatch`", "", 5),
    Term("seed", "Fixes a request's random draws, whatever shares its batch.", "`seed`", "`sampling_seed`", "", 1),
    Term("self-consistency", "Several sampled answers to one question, and a vote.", "`n`", "`n`", "Wang et al., 2022", 7),
    Term("seq_lens", "How many tokens each sequence has, cached and new.", "`seq_lens`", "`seq_lens`", "", 4),
    Term("SJF", "Shortest job first.", "", "", "", 9),
    Term("sliding window", "A layer that sees the last w tokens only.",
         "`SlidingWindowSpec`", "`SWATokenToKVPoolAllocator`", "Mistral 7B", 2),
    Term("SLO", "Service level objective: a latency that is promised, as P99 of ITL below 50 ms.", "", "", "DistServe", 8),
    Term("slot_mapping", "Where each new token's key and value go: block id × block_size + place in the block.",
         "`slot_mapping`", "`out_cache_loc`", "", 6),
    Term("SM", "Streaming multiprocessor: one of a GPU's cores, which run programs.", "", "", "", 10),
    Term("SmoothQuant", "Moves the size of activation outliers into the weights before 8-bit rounding.", "", "", "Xiao et al., 2022", 16),
    Term("speculative decoding", "Guess several tokens cheaply, verify them in one step of the large model.",
         "`speculative_config`", "`--speculative-algorithm`", "Leviathan et al., 2023", 18),
    Term("split-KV", "The cache of one long sequence is attended to in parallel pieces, which are merged.",
         "", "`num_kv_splits`", "Flash-Decoding", 13),
    Term("stop string", "Text that ends the output and is not part of it.", "`stop`", "`stop`", "", 1),
    Term("structured output", "Output that is sure to match a schema, because other tokens are masked.",
         "`StructuredOutputsParams`", "`json_schema`, `regex`, `ebnf`", "constrained decoding", 19),
    Term("swap", "Preemption that moves blocks to host memory and back.", "V0 only", "", "swapping (PagedAttention)", 6),
    Term("SwiGLU", "Feed-forward layer in which one half, through SiLU, gates the other.",
         "`SiluAndMul`", "`SiluAndMul`", "Shazeer, 2020", 2),
    Term("TBT", "Time between tokens: Sarathi-Serve's name for ITL.", "", "", "Sarathi-Serve", 8),
    Term("temperature", "Divides the logits: below 1 the best gain, above 1 the tail.", "`temperature`", "`temperature`", "", 1),
    Term("tensor core", "The unit of an SM that multiplies small matrices in one instruction.", "", "", "", 11),
    Term("tensor parallel", "Each matrix is cut over the devices, which exchange sums in every layer.",
         "`tensor_parallel_size`", "`--tp-size`", "Megatron-LM", 20),
    Term("tied embeddings", "The output layer uses the embedding matrix.", "`tie_word_embeddings`", "`tie_word_embeddings`", "", 2),
    Term("tile", "The piece of a matrix that one program works on, held in fast memory.", "", "", "", 11),
    Term("token", "A piece of text with a number; what the model reads and writes.", "`token_ids`", "`input_ids`, `output_ids`", "", 1),
    Term("token mask", "Which tokens the grammar allows next, one bit each.", "`grammar_bitmask`", "`vocab_mask`", "", 19),
    Term("top-k", "Keeps the k most probable tokens.", "`top_k`", "`top_k`", "Fan et al., 2018", 1),
    Term("top-p", "Keeps the smallest set of tokens whose probability reaches p.",
         "`top_p`", "`top_p`", "nucleus sampling (Holtzman et al., 2020)", 1),
    Term("TPOT", "Time per output token: from first to last token ÷ (tokens − 1), one number a request.",
         "`vllm:request_time_per_output_token_seconds`", "`mean_tpot_ms` of `bench_serving`", "", 3),
    Term("tree verification", "Several drafts as a tree, verified in one step under a mask.",
         "", "`EagleVerifyInput`", "SpecInfer, Medusa", 18),
    Term("TTFT", "Time to first token, from the request's arrival.",
         "`vllm:time_to_first_token_seconds`", "`sglang:time_to_first_token_seconds`", "", 3),
    Term("virtual clock", "The time that the simulator counts instead of waiting.", "", "", "", 9),
    Term("W4A16", "Weights in 4 bits, activations in 16.", "`awq_marlin`, `gptq_marlin`", "`awq_marlin`, `gptq_marlin`", "", 15),
    Term("W8A8", "Weights and activations in 8 bits, so that the multiplication itself is one of 8 bits.", "", "", "W8A8 (SmoothQuant)", 16),
    Term("warp", "32 threads of a GPU that take each step together.", "", "", "", 10),
]
