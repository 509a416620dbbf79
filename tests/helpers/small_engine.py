"""An engine without a model, requests for it, and what its steps were."""

from __future__ import annotations

from minillm import SamplingParams
from minillm.engine.engine import Engine
from minillm.engine.request import Request
from minillm.engine.scheduler import Scheduler
from minillm.engine.simulator import VirtualClock
from minillm.kv_cache.manager import KVCacheManager
from tests.helpers.block_memory import BlockMemory


def engine_of(num_blocks=20, block_size=4, max_num_seqs=4, budget=100, host=0, **scheduler_settings) -> Engine:
    kv_cache = KVCacheManager(num_blocks, block_size, num_host_blocks=host)
    scheduler = Scheduler(kv_cache, max_num_seqs, budget, **scheduler_settings)
    return Engine(scheduler=scheduler, runner=BlockMemory(block_size), clock=VirtualClock())


def ask(name: str, prompt: list[int], max_tokens: int = 4, n: int = 1) -> Request:
    return Request(
        name, prompt, SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True), max_tokens, arrival_time=0.0
    )


def serve(engine: Engine, *requests: Request) -> list[list[tuple]]:
    """Run to the end; for every step its rows as (id, start, tokens)."""
    for request in requests:
        engine.add_request(request)
    steps, execute = [], engine.runner.execute

    def recorded(output):
        steps.append([(row.request_id, row.start, row.num_tokens) for row in output.rows])
        return execute(output)

    engine.runner.execute = recorded
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check_integrity()
    engine.runner.execute = execute
    return steps
