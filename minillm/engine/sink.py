"""OutputSink: all that becomes of one request, for the caller that waits for it. Built in chapter 05.

    TokenDelta -> OutputSink.take -> StreamDelta -> on_delta           piece by piece, while it streams
                                  -> RequestOutput                     whole, when it has ended

The engine deals in tokens, its callers in text. Text is made of every token at once only where a caller reads along, or
where a stop string has to be found in it; otherwise when the output is asked for, which is after the step.

    sink = llm.submit("Once upon a time", SamplingParams(max_tokens=8))     nothing is computed yet
    while not sink.is_finished:
        llm.step()                                                          the requests of all callers, in one batch
    print(sink.output().outputs[0].text)
"""

from __future__ import annotations

from collections.abc import Callable

from minillm.engine.deltas import TokenDelta
from minillm.engine.detokenizer import CHARACTER_TOKENS, Detokenizer, with_texts
from minillm.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamDelta
from minillm.engine.request import Request

Decode = Callable[[list[int]], str]


class OutputSink:
    """Collects what a request and the samples split off it generate, and notifies its caller.

    `decode` maps token ids to text, `decode_all` the special ones too, for the names of tokens. `streaming` makes text
    of every token at once. `on_delta(sink, delta)` is called for each token inside the step that made it,
    whichever caller asked for that step. The last delta of a sample has a `finish_reason`; it is "abort" when the
    request was aborted, and when a step failed: then `error` says with what. It may submit more requests,
    but may not ask for a step. What it raises ends its own request and is its `error`; the others are notified,
    then it goes on to the caller of `LLM.step`. `on_finish` is called when the last sample has ended.
    `invalid_byte` is the `Detokenizer`'s.
    """

    def __init__(
        self,
        request: Request,
        decode: Decode,
        decode_all: Decode,
        clock: Callable[[], float],
        end: Callable[[list[Request]], None] = lambda requests: None,
        streaming: bool = False,
        on_delta: Callable[[OutputSink, StreamDelta], None] | None = None,
        on_finish: Callable[[OutputSink], None] | None = None,
        name: str | None = None,
        invalid_byte: int | None = None,
    ):
        self.request, self.decode, self.decode_all, self.clock, self.end = request, decode, decode_all, clock, end
        self.on_delta, self.on_finish, self.invalid_byte = on_delta, on_finish, invalid_byte
        self.name = request.group_id if name is None else name  # under which its caller knows it
        self.error: BaseException | None = None  # of the step, or the callback, that ended it
        params = request.params
        lora = request.spec.lora_request
        self.samples = [CompletionOutput(index, "", [], lora_request=lora) for index in range(params.n)]
        if params.reports_logprobs:
            for sample in self.samples:
                sample.logprobs, sample.cumulative_logprob = [], 0.0
        self._name = decode_all if params.detokenize else None  # for the names of tokens
        self.at_once = params.detokenize and (streaming or bool(params.stop))
        self._detokenizers = [self._detokenizer() for _ in self.samples] if self.at_once else []
        self._num_open = params.n
        self._output: RequestOutput | None = None
        self._completed = True  # whether every sample came to an end of its own
        self.first_token_time: float | None = None
        self.finished_time: float | None = None
        self.num_preemptions = self.num_drafted_tokens = self.num_accepted_tokens = 0

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come: it has ended, was aborted or withdrawn."""
        return self._num_open == 0

    def has_ended(self, index: int) -> bool:
        """Whether sample `index` is complete: tokens of the same step behind a stop string are not its own."""
        return self.samples[index].finish_reason is not None

    def take(self, delta: TokenDelta) -> StreamDelta:
        """Add a token. The answer's `finish_reason` may be "stop" where the delta has none: a stop string was
        completed, and the engine has to be told.
        """
        request = delta.request
        sample = self.samples[request.index]
        token_ids = [] if delta.token_id is None else [delta.token_id]
        sample.token_ids += token_ids
        if self.first_token_time is None and token_ids:
            self.first_token_time = request.token_times[0]
        named = None
        if delta.logprobs is not None:
            sample.cumulative_logprob += delta.logprobs[delta.token_id].logprob
            named = with_texts(delta.logprobs, self._name, sample.token_ids[-CHARACTER_TOKENS - 1 : -1])
            sample.logprobs.append(named)
        finish_reason, text = delta.finish_reason, ""
        if self.at_once:
            text, finish_reason = self._text(sample, delta)
        if finish_reason:
            self._close(sample, request, finish_reason)
        return StreamDelta(
            text,
            token_ids,
            finish_reason,
            sample.error,
            self.name,
            request.index,
            named and [named],
            sample.stop_reason,
        )

    def notify(self, delta: StreamDelta) -> None:
        """A token was taken."""
        if self.on_delta is not None:
            self.on_delta(self, delta)

    def withdraw(self) -> None:
        """End it now, at any moment; nothing happens if it is finished."""
        if not self.is_finished:
            self.end([self.request])
            self.abort()

    def abort(self, error: BaseException | None = None) -> None:
        """End every sample that has not ended: it was aborted, or a step failed with `error`."""
        if self.is_finished:
            return
        self.error, self._completed = error, False
        for sample in self.samples:
            if sample.finish_reason is None:
                if self.at_once:
                    sample.text += self._detokenizers[sample.index].finish()
                self._close(sample, None, "abort")

    def fail(self, error: BaseException | None) -> None:
        """`abort`, of which the caller is notified."""
        if not self.is_finished:
            self.abort(error)
            self.notify(StreamDelta("", [], "abort", None if error is None else repr(error), self.name))

    def output(self) -> RequestOutput:
        """What it generated. Raises RuntimeError if it is not finished, or did not come to an end."""
        if not self.is_finished or not self._completed:
            why = "it is still under way; call llm.step()" if not self.is_finished else "it was withdrawn or aborted"
            why = why if self.error is None else f"it was ended by {self.error!r}"
            raise RuntimeError(f"request {self.request.request_id} has no output: {why}") from self.error
        return self.collected()

    def collected(self) -> RequestOutput:
        """`output`, or what there was of it when the request was aborted."""
        if self._output is None:
            self._output = self._make_output()
        return self._output

    def so_far(self) -> RequestOutput:
        """What there is of it at this moment; the texts only where they are made of every token at once."""
        request = self.request
        if self.is_finished:
            return self.collected()
        metrics = RequestMetrics.of(request, self)
        prompt = (request.prompt, request.prompt_token_ids, None)
        return RequestOutput(self.name, *prompt, self.samples, False, metrics, request.spec.lora_request)

    def _make_output(self) -> RequestOutput:
        request = self.request
        if not self.at_once and request.params.detokenize:
            for sample in self.samples:
                ended = sample.finish_reason == "stop" and not request.params.include_stop_str_in_output
                sample.text = self._detokenizer().whole(sample.token_ids[:-1] if ended else sample.token_ids)
        prompt, rows = request.prompt_token_ids, request.prompt_logprobs
        prompt_logprobs = rows and [
            with_texts(row, self._name, prompt[max(0, i - CHARACTER_TOKENS) : i]) for i, row in enumerate(rows)
        ]
        metrics = RequestMetrics.of(request, self)
        told = (request.prompt, request.prompt_token_ids, prompt_logprobs)
        return RequestOutput(self.name, *told, self.samples, True, metrics, request.spec.lora_request)

    def _text(self, sample: CompletionOutput, delta: TokenDelta) -> tuple[str, str | None]:
        """The new text, and why the sample ends with this token if it does."""
        detokenizer, finish_reason, text = self._detokenizers[sample.index], delta.finish_reason, ""
        # A stop token ends the text, and is a part of it only where the caller wants it.
        kept = finish_reason != "stop" or self.request.params.include_stop_str_in_output
        if kept and delta.token_id is not None:
            text = detokenizer.add(delta.token_id)
        if finish_reason:
            text += detokenizer.finish()
        if detokenizer.stop_string is not None:
            finish_reason, sample.stop_reason = "stop", detokenizer.stop_string
        sample.text += text
        return text, finish_reason

    def _close(self, sample: CompletionOutput, request: Request | None, finish_reason: str) -> None:
        sample.finish_reason = finish_reason
        if request is not None:
            if finish_reason == "error":
                sample.error = request.error
            if sample.stop_reason is None:
                sample.stop_reason = request.stop_reason
            self.num_preemptions += request.num_preemptions
            self.num_drafted_tokens += request.num_drafted_tokens
            self.num_accepted_tokens += request.num_accepted_tokens
        self._num_open -= 1
        if self.is_finished:
            self.finished_time = self.clock()
            if self.on_finish is not None:
                self.on_finish(self)

    def _detokenizer(self) -> Detokenizer:
        params = self.request.params
        return Detokenizer(
            self.decode,
            self.request.prompt_token_ids,
            params.stop,
            params.min_tokens,
            params.begins_whole,
            params.include_stop_str_in_output,
            self.invalid_byte,
            self.request.spec.taken_back,
        )
