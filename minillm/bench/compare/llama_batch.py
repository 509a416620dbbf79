"""llama.cpp with many sequences in a batch, as an engine of the comparison. Built in chapter 14.

The prompts are computed first, packed into batches, then all sequences decode together, each until its length is
reached. The next token is the most likely one whatever the temperature is: that is the least that sampling can cost.
llama.cpp keeps the KV cache of several sequences in one buffer or in one for each; which is faster depends on the
batch, so both are tried once on each size, and the faster one is used from then on.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import numpy as np

from .request import Answer, Request

MAX_BATCH = 2048  # tokens in one call, llama.cpp's default; it splits them into micro-batches of 512


class LlamaCppBatch:
    def __init__(self, path: Path, threads: int, float32_cache: bool):
        import llama_cpp

        self.lib, self.version = llama_cpp, llama_cpp.__version__
        self.threads, self.float32_cache = threads, float32_cache
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p(0))
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}; is it a GGUF file of a model that it knows?")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(MAX_BATCH, 0, 1)
        self.context, self.room = None, (0, 0, False)
        self.unified: dict[tuple[int, int], bool] = {}  # (sequences, tokens of each) -> the faster layout of the cache

    def answer(self, request: Request) -> Answer:
        size = len(request.prompts), -(-request.max_tokens // 256) * 256  # llama.cpp rounds a cache up to that
        if size[0] == 1:
            return self._answer(request, *size, unified=False)
        if size not in self.unified:
            seconds = {unified: self._answer(request, *size, unified).seconds for unified in (False, True)}
            self.unified[size] = seconds[True] < seconds[False]
        return self._answer(request, *size, self.unified[size])

    def _answer(self, request: Request, num_seqs: int, max_tokens: int, unified: bool) -> Answer:
        self._make_room(num_seqs, max_tokens, unified)
        token_ids: list[list[int]] = [[] for _ in request.prompts]
        started = time.monotonic()
        rows: list[tuple[int, int, int, bool]] = []  # sequence, position, token, are its logits needed?
        for sequence, prompt in enumerate(request.prompts):
            for position, token in enumerate(prompt):
                rows.append((sequence, position, token, position + 1 == len(prompt)))
        for start in range(0, len(rows), MAX_BATCH):
            self._decode(rows[start : start + MAX_BATCH], token_ids)
        first = time.monotonic()
        while rows := [
            (sequence, len(prompt) + len(made) - 1, made[-1], True)
            for sequence, (prompt, made, length) in enumerate(zip(request.prompts, token_ids, request.lengths))
            if len(made) < length
        ]:
            self._decode(rows, token_ids)
        return Answer(token_ids, time.monotonic() - started, first - started, len(request.prompts))

    def _decode(self, rows: list[tuple[int, int, int, bool]], token_ids: list[list[int]]) -> None:
        """Compute `rows`; where logits are needed, the most likely token is appended to its sequence's tokens."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (sequence, position, token, last) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, last
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if status := self.lib.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode failed with status {status} on {len(rows)} tokens")
        for i, (sequence, _, _, last) in enumerate(rows):
            if last:
                logits = np.ctypeslib.as_array(self.lib.llama_get_logits_ith(self.context, i), (self.vocab_size,))
                token_ids[sequence].append(int(logits.argmax()))

    def _make_room(self, num_seqs: int, max_tokens: int, unified: bool) -> None:
        """An empty KV cache for `num_seqs` sequences of `max_tokens` tokens; one of the same size is used again."""
        if self.room != (num_seqs, max_tokens, unified):
            self._free_context()
            params = self.lib.llama_context_default_params()
            params.n_ctx, params.n_batch, params.n_seq_max = num_seqs * max_tokens, MAX_BATCH, num_seqs
            params.n_threads = params.n_threads_batch = self.threads
            params.kv_unified = unified
            params.type_k = params.type_v = self.lib.GGML_TYPE_F32 if self.float32_cache else self.lib.GGML_TYPE_F16
            self.context = self.lib.llama_init_from_model(self.model, params)
            if not self.context:
                raise RuntimeError(f"llama.cpp has no memory for {num_seqs} sequences of {max_tokens} tokens")
            self.room = (num_seqs, max_tokens, unified)
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def _free_context(self) -> None:
        if self.context:
            self.lib.llama_free(self.context)
        self.context, self.room = None, (0, 0, False)

    def close(self) -> None:
        self._free_context()
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_model_free(self.model)
