"""OutputCollector: a request's tokens become text, samples and a RequestOutput. Built in chapter 05.

The engine deals in tokens. Whoever asked wants text: piece by piece while it streams, or whole at the end, which is
cheaper, since a whole text is decoded at once. A stop string can only be seen in the text, so it is found here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from minillm.engine.detokenizer import CHARACTER_TOKENS, Detokenizer, token_text
from minillm.engine.engine import TokenDelta
from minillm.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamDelta
from minillm.engine.request import Request
from minillm.sampling.logprobs import Logprob


class OutputCollector:
    """Collects what a request and the samples split off it say.

    `decode` maps token ids to text, `decode_all` the special ones too, for the names of tokens. `streaming` makes text
    of every token at once. `on_finish` is called when the last sample has ended.
    """

    def __init__(
        self,
        request: Request,
        decode: Callable[[list[int]], str],
        decode_all: Callable[[list[int]], str],
        streaming: bool = False,
        on_finish: Callable[[OutputCollector], None] | None = None,
    ):
        self.request, self.on_finish = request, on_finish
        self.error: BaseException | None = None  # of the step that failed
        self.decode, self.decode_all = decode, decode_all
        params = request.params
        with_logprobs = {} if params.logprobs is None else {"cumulative_logprob": 0.0}
        self.samples = [CompletionOutput(index, "", [], **with_logprobs) for index in range(params.n)]
        if params.logprobs is not None:
            for sample in self.samples:
                sample.logprobs = []
        self.at_once = streaming or bool(params.stop)
        self._detokenizers = [self._detokenizer() for _ in self.samples] if self.at_once else []
        self._num_open = params.n
        self.first_token_time: float | None = None
        self.num_preemptions = self.num_drafted_tokens = self.num_accepted_tokens = 0

    @property
    def is_finished(self) -> bool:
        return self._num_open == 0

    def has_ended(self, index: int) -> bool:
        """Whether sample `index` is complete: tokens that come in the same step behind a stop string are not its
        own."""
        return self.samples[index].finish_reason is not None

    def add(self, delta: TokenDelta) -> StreamDelta:
        """Take a token. The answer's `finish_reason` may say "stop" where the delta's says nothing: a stop string was
        met, and the engine has to be told.
        """
        request = delta.request
        sample = self.samples[request.index]
        token_ids = [] if delta.token_id is None else [delta.token_id]
        sample.token_ids += token_ids
        if self.first_token_time is None and token_ids:
            self.first_token_time = request.token_times[0]
        if delta.logprobs is not None:
            sample.cumulative_logprob += delta.logprobs[delta.token_id].logprob
            sample.logprobs.append(self._named(delta.logprobs, sample.token_ids[-CHARACTER_TOKENS - 1 : -1]))
        finish_reason, text = delta.finish_reason, ""
        if self.at_once:
            text, finish_reason = self._text(sample, delta)
        if finish_reason:
            self._close(sample, request, finish_reason)
        return StreamDelta(text, token_ids, finish_reason, sample.error)

    def abort(self) -> None:
        """End every sample that has not ended."""
        for sample in self.samples:
            if sample.finish_reason is None:
                if self.at_once:
                    sample.text += self._detokenizers[sample.index].finish()
                self._close(sample, None, "abort")

    def output(self, finished_time: float) -> RequestOutput:
        request = self.request
        prompt, rows = request.prompt_token_ids, request.prompt_logprobs
        prompt_logprobs = rows and [
            self._named(row, prompt[max(0, i - CHARACTER_TOKENS) : i]) for i, row in enumerate(rows)
        ]
        metrics = RequestMetrics(
            request.arrival_time,
            self.first_token_time,
            finished_time,
            request.num_cached_tokens,
            self.num_preemptions,
            request.token_times,
            request.cached_tokens,
            self.num_drafted_tokens,
            self.num_accepted_tokens,
        )
        return RequestOutput(
            request.group_id,
            request.prompt,
            request.prompt_token_ids,
            self.samples,
            metrics,
            prompt_logprobs=prompt_logprobs,
        )

    def _text(self, sample: CompletionOutput, delta: TokenDelta) -> tuple[str, str | None]:
        """The new text, and why the sample ends with this token if it does."""
        detokenizer, finish_reason, text = self._detokenizers[sample.index], delta.finish_reason, ""
        if finish_reason != "stop" and delta.token_id is not None:  # a stop token ends the text and is no part of it
            text = detokenizer.add(delta.token_id)
        if finish_reason:
            text += detokenizer.finish()
        if detokenizer.stop_string is not None:
            finish_reason, sample.stop_reason = "stop", detokenizer.stop_string
        sample.text += text
        return text, finish_reason

    def _close(self, sample: CompletionOutput, request: Request | None, finish_reason: str) -> None:
        sample.finish_reason = finish_reason
        if not self.at_once:
            ended = finish_reason == "stop"
            sample.text = self._detokenizer().whole(sample.token_ids[:-1] if ended else sample.token_ids)
        if request is not None:
            if finish_reason == "error":
                sample.error = str(request.error)
            if sample.stop_reason is None:
                sample.stop_reason = request.stop_reason
            self.num_preemptions += request.num_preemptions
            self.num_drafted_tokens += request.num_drafted_tokens
            self.num_accepted_tokens += request.num_accepted_tokens
        self._num_open -= 1
        if self.on_finish is not None and self.is_finished:
            self.on_finish(self)

    def _detokenizer(self) -> Detokenizer:
        params = self.request.params
        begins_whole = self.request.grammar is not None
        return Detokenizer(self.decode, self.request.prompt_token_ids, params.stop, params.min_tokens, begins_whole)

    def _named(self, row: dict[int, Logprob] | None, before: list[int]) -> dict[int, Logprob] | None:
        """The log-probabilities of the tokens that may follow `before`, each with its text."""
        if row is None:
            return None
        return {
            one: replace(entry, decoded_token=token_text(self.decode_all, one, before)) for one, entry in row.items()
        }
