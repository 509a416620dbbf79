"""Requests that move between two engines, with their keys and values or without, on random settings: the tokens are
those of a plain engine, and neither engine keeps anything."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

import pytest

from minillm.book.roads.draw import draw
from minillm.book.roads.models import write_models
from minillm.book.roads.plain import PlainEngine
from minillm.book.roads.road import Arrival, Road
from minillm.book.roads.serve import check_idle, params_of, prompt_of, settings_of
from minillm.engine import handover
from minillm.engine.deltas import TokenDelta
from minillm.engine.llm import LLM
from minillm.engine.request import RequestSpec

MOST_STEPS = 2000
NUMBERS = count()
UNUSED = ("n", "stop", "include_stop_str_in_output")  # samples and texts are the front's


@dataclass
class Told:
    """What is known of a request from outside: what was asked, and the tokens that came."""

    spec: RequestSpec
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: BaseException | None = None
    engine: int = 0

    def rename(self) -> None:
        """Each engine that it is given to knows it by another id: steps in flight may still hold the last one."""
        name = f"{self.spec.request_id.partition('.')[0]}.{next(NUMBERS)}"
        self.spec = replace(self.spec, request_id=name, group_id=name)

    def take(self, delta: TokenDelta) -> None:
        assert self.finish_reason is None, "a token behind the last one"
        self.token_ids += [] if delta.token_id is None else [delta.token_id]
        self.finish_reason = delta.finish_reason

    def fail(self, error: BaseException | None) -> None:
        self.error, self.finish_reason = error, "failed"


class Pair:
    """Two engines with the same settings; requests arrive at either, and move."""

    def __init__(self, road: Road, models, rng: Random, folder):
        self.road, self.rng, self.counts = road, rng, Counter()
        self.llms = [LLM(**settings_of(road, models, folder / str(number))) for number in (0, 1)]
        self.told: dict[str, Told] = {}

    def serve(self) -> list[Told]:
        for step in range(MOST_STEPS):
            for index, arrival in enumerate(self.road.requests):
                if arrival.at == step:
                    self.add(f"m{index}", arrival)
            live = [told for told in self.told.values() if told.finish_reason is None]
            if not live and len(self.told) == len(self.road.requests):
                return [self.told[f"m{index}"] for index in range(len(self.told))]
            if live and self.rng.random() < 0.25:
                (self.move if self.rng.random() < 0.7 else self.crash)(self.rng.choice(live))
            self.step()
        raise AssertionError("it never ended")

    def step(self) -> None:
        for llm in self.llms:
            if llm.engine.has_unfinished:
                llm.step_once()
                llm.engine.scheduler.check_integrity()
        for told in self.told.values():
            if told.finish_reason is not None:
                self.llms[told.engine].outputs.raw.pop(told.spec.request_id, None)

    def add(self, name: str, arrival: Arrival) -> None:
        llm = self.llms[0]
        [request] = llm.inputs.requests(prompt_of(arrival), params_of(arrival))
        spec = replace(request.spec, request_id=name, group_id=name)
        self.told[name] = Told(spec)
        self.resume(self.told[name], self.rng.randrange(2))

    def resume(self, told: Told, engine: int) -> None:
        told.engine = engine
        told.rename()
        self.llms[engine].outputs.add_raw(handover.resumed(told.spec, told.token_ids), told)

    def move(self, told: Told) -> None:
        name, source, target = told.spec.request_id, self.llms[told.engine].engine, self.llms[1 - told.engine].engine
        num_copied = 0
        for _ in range(self.rng.choice((0, 1, 3))):
            copied = handover.copy_blocks(source, name, num_copied)
            if copied.data is not None:
                self.counts["staged"] += handover.stage(target, copied.hashes, copied.data)
            num_copied = copied.end
            self.step()
            if told.finish_reason is not None:
                assert handover.copy_blocks(source, name, 0) is None and handover.take_out(source, name, 0) is None
                return
        taken = handover.take_out(source, name, num_copied)
        self.llms[told.engine].outputs.raw.pop(name)
        told.rename()
        request = handover.resumed(told.spec, told.token_ids)
        if handover.take_in(target, request, taken):
            told.engine = 1 - told.engine
            self.llms[told.engine].outputs.raw[told.spec.request_id] = told
            self.counts["took in"] += 1
            self.counts["computed tokens moved"] += taken.num_computed_tokens
        else:
            self.counts["computed again"] += 1
            self.resume(told, 1 - told.engine)
        self.llms[0].engine.scheduler.check_integrity()
        self.llms[1].engine.scheduler.check_integrity()

    def crash(self, one: Told) -> None:
        """The engine of a request loses all that is under way; the other one resumes it."""
        dead, engine = one.engine, self.llms[one.engine].engine
        for told in list(self.told.values()):
            if told.engine == dead and told.finish_reason is None:
                self.llms[dead].outputs.raw.pop(told.spec.request_id)
                engine.abort(told.spec.request_id)
                self.resume(told, 1 - dead)
                self.counts["resumed"] += 1


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> PlainEngine:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return PlainEngine(folder)


def plain_of(seed: int) -> Road:
    road = draw(seed)
    arrivals = []
    for one in road.requests:
        params = {name: value for name, value in one.params.items() if name not in UNUSED}
        arrivals.append(
            replace(one, params=params | {"seed": 7} if params.get("temperature") else params, adapter=None)
        )
    return replace(road, requests=tuple(arrivals), max_loras=0, fails_at=None)


def check(plain: PlainEngine, seed: int, folder) -> Counter:
    road = plain_of(seed)
    pair = Pair(road, plain.models, Random(f"moves {seed}"), folder)
    try:
        for arrival, told in zip(road.requests, pair.serve()):
            [wanted] = plain.answer(road, arrival).samples
            if told.token_ids != wanted.token_ids or told.finish_reason != wanted.finish_reason:
                assert plain.is_undecided(road, arrival), (seed, arrival, told, wanted)
        for llm in pair.llms:
            check_idle(llm)
    finally:
        for llm in pair.llms:
            llm.close()
    return pair.counts


def test_tokens_do_not_depend_on_where_they_are_generated(plain, tmp_path):
    counts: Counter = Counter()
    for seed in range(1, 25):
        counts += check(plain, seed, tmp_path / str(seed))
    assert min(counts[name] for name in ("staged", "took in", "computed again", "resumed")) >= 3, counts


def test_a_request_that_is_under_way_is_not_taken_in_twice(plain, tmp_path):
    llm = LLM(**settings_of(plain_of(1), plain.models, tmp_path))
    [request] = llm.inputs.requests("Once upon a time")
    llm.engine.add_request(request)
    with pytest.raises(ValueError, match=f"request_id='{request.request_id}' is in use"):
        handover.take_in(llm.engine, request, handover.TakenOut(1, [None], None))
    llm.close()
