"""Names of vLLM's parameters that the book does not build, each with what comes nearest. Built in chapter 01."""

from __future__ import annotations

from minillm.sampling.checks import Absent

PARAMS = {
    "watermarking": Absent("the book builds no watermark"),
    "prompt_logprob_token_ids": Absent("prompt_logprobs=-1 reports every token of the vocabulary"),
    "prompt_logprob_start": Absent("write logprob_start_len into the prompt: {'prompt': ..., 'logprob_start_len': 5}"),
    "flat_logprobs": Absent("logprobs are a list of dictionaries", False),
    "stream_interval": Absent("each step's token is handed out at once"),
    "skip_clone": Absent("every request has a copy of its parameters", False),
    "skip_reading_prefix_cache": Absent("give the prompt a cache_salt of its own: {'prompt': ..., 'cache_salt': 'x'}"),
    "thinking_token_budget": Absent(
        "write it beside the marker: structured_outputs={'json': ..., 'after': '</think>', 'thinking_token_budget': 99}"
    ),
    "repetition_detection": Absent("repetition_penalty and frequency_penalty make repetitions less probable"),
    "routed_experts_prompt_start": Absent("routed experts are not reported", 0),
    "trace_decode_token_ids": Absent("to score given tokens, put them into the prompt and ask for prompt_logprobs"),
    "output_text_buffer_length": Absent("the detokenizer holds back what may become a stop string", 0),
    "best_of": Absent("ask for n samples with logprobs=0, and take the best cumulative_logprob"),
    "guided_decoding": Absent("vLLM renamed it: structured_outputs=StructuredOutputsParams(...)"),
    "truncate_prompt_tokens": Absent("cut the prompt's token ids yourself: {'prompt_token_ids': ids[-100:]}"),
}
STRUCTURED = {
    "backend": Absent("regex and choice use the book's automaton, everything else uses llguidance"),
    "disable_fallback": Absent("there is one backend for each constraint", False),
}
BEAM = {
    "watermarking": Absent("the book builds no watermark"),
    "structured_outputs": Absent("a beam search is not constrained; use generate() with n samples"),
    "temperature": Absent("a beam search samples nothing; use generate() with n samples", 0.0),
}
