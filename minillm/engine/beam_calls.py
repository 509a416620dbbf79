"""LLM.beam_search: the search over the requests of an engine. Built in chapter 06."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minillm.engine.beams import ArrivedTokens, search_beams
from minillm.engine.engine import Engine
from minillm.engine.inputs import InputProcessor, Prompt
from minillm.engine.lock import locked
from minillm.engine.lora_request import LoRAs
from minillm.engine.output_processor import OutputProcessor
from minillm.engine.outputs import BeamSearchOutput
from minillm.engine.request import Request
from minillm.sampling.params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from minillm.engine.deltas import TokenDelta


class BeamSearching:
    """The part of `LLM` that searches."""

    engine: Engine
    inputs: InputProcessor
    outputs: OutputProcessor
    step_once: Callable[[], list[TokenDelta]]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | None = None,
        lora_request: LoRAs = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
        **fields: Any,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` most probable continuations of each prompt that the search finds, best first; instead of
        `params` their fields may be given by name.

        The search of a prompt is one turn: other threads' requests are computed in its steps, and their calls return
        after it. So prompts are searched one after the other, whatever `concurrency_limit` says.
        """
        if params is not None and fields:
            raise TypeError(f"beam_search has params and {', '.join(fields)}; give either")
        search = BeamSearchParams(**{"beam_width": 4, "max_tokens": 64, **fields}) if params is None else params
        if not isinstance(search, BeamSearchParams):
            raise TypeError(f"params={params!r} is not allowed; allowed: a BeamSearchParams")
        search = replace(search)  # checked anew: a field may have been changed
        self.engine.check_open()
        sampling = SamplingParams(temperature=0.0, max_tokens=search.max_tokens, ignore_eos=search.ignore_eos)
        requests = self.inputs.requests(prompts, sampling, lora_request=lora_request)
        return [self._search(request, search) for request in requests]

    @locked
    def _search(self, request: Request, search: BeamSearchParams) -> BeamSearchOutput:
        deltas = self.outputs.raw[request.group_id] = ArrivedTokens()

        def step() -> None:
            try:
                self.step_once()
            except Exception:
                if deltas.error is not None or not self.engine.is_open:
                    raise  # else it belongs to another call, which hears of it

        try:
            decode = self.outputs.decode if search.skip_special_tokens else self.outputs.decode_all
            return search_beams(self.engine, request, search, step, deltas, decode)
        finally:
            self.outputs.withdraw([request])
