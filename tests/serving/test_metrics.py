"""/metrics: exact counts after known requests, under the names that vLLM's dashboards query."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from minillm import AsyncLLM
from minillm.engine.counters import Distribution
from minillm.engine.llm import LLM
from minillm.engine.serving_counters import ServingCounters, lengths_up_to
from minillm.sampling.params import SamplingParams
from minillm.serving.run import RunningServer

from .conftest import MODEL, PATIENCE, settle, wait_until

# What the Grafana dashboards in vLLM's repository query (examples/online_serving/prometheus_grafana and dashboards).
DASHBOARD = """
vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_sum vllm:e2e_request_latency_seconds_count
vllm:prompt_tokens_total vllm:generation_tokens_total vllm:inter_token_latency_seconds_bucket
vllm:inter_token_latency_seconds_sum vllm:inter_token_latency_seconds_count vllm:time_per_output_token_seconds_bucket
vllm:time_per_output_token_seconds_sum vllm:time_per_output_token_seconds_count vllm:num_requests_running
vllm:num_requests_waiting vllm:time_to_first_token_seconds_bucket vllm:time_to_first_token_seconds_sum
vllm:time_to_first_token_seconds_count vllm:gpu_cache_usage_perc vllm:kv_cache_usage_perc
vllm:request_prompt_tokens_bucket vllm:request_prompt_tokens_sum vllm:request_prompt_tokens_count
vllm:request_generation_tokens_bucket vllm:request_generation_tokens_sum vllm:request_generation_tokens_count
vllm:request_success_total vllm:request_queue_time_seconds_sum vllm:request_prefill_time_seconds_sum
vllm:request_decode_time_seconds_sum vllm:request_max_num_generation_tokens_sum vllm:prefix_cache_hits_total
vllm:prefix_cache_queries_total vllm:iteration_tokens_total_count vllm:num_preemptions_total
""".split()


def scraped(server: RunningServer) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Every sample by its name."""
    text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(server: RunningServer, name: str, **labels: str) -> float:
    """The sum over what has these labels."""
    settle(server.service.engine)
    found = scraped(server)[name]
    return sum(value for has, value in found if labels.items() <= has.items())


def ask(server: RunningServer, **body: object) -> httpx.Response:
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 6, "ignore_eos": True} | body
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)


@pytest.fixture
def growth(serve):
    """A server, and how much a sample grows over some requests."""
    server = serve()

    def grown(names: list[str], act: Callable[[], object], **labels: str) -> list[float]:
        before = [value(server, name, **labels) for name in names]
        act()
        return [value(server, name, **labels) - was for name, was in zip(names, before)]

    grown.server = server
    return grown


def test_the_dashboards_of_vllm_find_their_names(growth):
    found = scraped(growth.server)
    assert [name for name in DASHBOARD if name not in found] == []
    for labels, _ in (sample for name in DASHBOARD for sample in found[name]):
        assert labels["model_name"] == MODEL and labels["engine"] == "0"
    ((config, one),) = found["vllm:cache_config_info"]
    assert one == 1 and config["num_gpu_blocks"] == "600" and config["block_size"] == "16"


def test_known_requests_are_counted_exactly(growth, llm):
    prompt = len(llm.tokenizer.encode("Once upon a time"))
    names = ["vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count"]
    names += ["vllm:inter_token_latency_seconds_count", "vllm:e2e_request_latency_seconds_count"]
    names += [
        "vllm:request_generation_tokens_sum",
        "vllm:request_prompt_tokens_sum",
        "vllm:request_queue_time_seconds_count",
    ]
    names += ["vllm:request_max_num_generation_tokens_sum", "vllm:iteration_tokens_total_count"]
    grown = growth(names, lambda: [ask(growth.server) for _ in range(3)])
    assert grown == [3 * prompt, 18, 3, 15, 3, 18, 3 * prompt, 3, 18, 18]


def test_samples_share_their_prompt(growth, llm):
    prompt = len(llm.tokenizer.encode("Once upon a time"))
    names = ["vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"]
    names += [
        "vllm:request_generation_tokens_count",
        "vllm:request_params_n_sum",
        "vllm:time_to_first_token_seconds_count",
    ]
    assert growth(names, lambda: ask(growth.server, n=4)) == [prompt, 24, 4, 4, 4, 1]


@contextmanager
def under_way(server: RunningServer) -> Iterator[None]:
    """One request that has made a token and makes no more; at the end its client leaves."""
    engine = server.service.engine
    engine.thread.pause()
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    try:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE):
            wait_until(lambda: engine.llm.engine.has_unfinished)
            engine.llm.step_once()
            yield
        wait_until(lambda: not server.service.calls)
    finally:
        engine.thread.resume()


def leave(server: RunningServer) -> None:
    with under_way(server):
        pass


def test_the_reasons_of_the_ends(growth):
    def act() -> None:
        ask(growth.server)
        ask(growth.server, stop=["e", "a", "o"], max_tokens=60)
        leave(growth.server)

    by_reason = {}
    for reason in ("length", "stop", "abort", "error"):
        (by_reason[reason],) = growth(["vllm:request_success_total"], act, finished_reason=reason)
    assert by_reason == {"length": 1, "stop": 1, "abort": 1, "error": 0}


def test_aborted_requests_are_in_no_latency(growth):
    names = ["vllm:request_success_total", "vllm:e2e_request_latency_seconds_count", "vllm:request_prompt_tokens_count"]
    assert growth(names, lambda: leave(growth.server)) == [1, 0, 0]


def test_a_failed_step_counts_as_error(growth, engine, monkeypatch):
    def act() -> None:
        def fail(*args: object) -> None:
            raise RuntimeError("the device is gone")

        with monkeypatch.context() as patch:
            patch.setattr(engine.llm.engine.executor, "execute", fail)
            patch.setattr(engine.llm.engine.executor, "launch", fail)
            assert ask(growth.server).status_code == 500

    assert growth(["vllm:request_success_total"], act, finished_reason="error") == [1]
    assert value(growth.server, "minillm:requests_refused_total", status="500") == 1


def test_the_prefix_cache_hits(growth, llm):
    prompt = list(range(10, 10 + 40))  # two whole blocks of 16, and 8 tokens
    llm.reset_prefix_cache()
    names = ["vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"]
    assert growth(names, lambda: [ask(growth.server, prompt=prompt) for _ in range(2)]) == [80, 32]


def test_refusals_by_status(serve):
    server = serve(max_body_bytes=2000, max_queued_requests=1)
    assert ask(server, prompt="x" * 3000).status_code == 413
    assert ask(server, prompt=["a", "b"]).status_code == 429
    assert ask(server, temperature=-1).status_code == 400
    assert ask(server, model="another").status_code == 404
    refused = {labels["status"]: count for labels, count in scraped(server)["minillm:requests_refused_total"]}
    assert refused == {"400": 1, "404": 1, "413": 1, "429": 1}


def test_two_servers_do_not_share_what_http_counts(serve):
    one, other = serve(), serve(served_model_name="other")
    ask(one, model="wrong")
    assert value(one, "minillm:requests_refused_total") == 1
    assert "minillm:requests_refused_total" not in scraped(other)
    assert {labels["model_name"] for labels, _ in scraped(other)["vllm:prompt_tokens_total"]} == {"other"}


def test_the_loop_is_watched(serve):
    server = serve()
    wait_until(lambda: sum(server.models.metrics.loop_lag.counts) >= 2)
    assert value(server, "minillm:event_loop_lag_seconds_count") >= 2


def test_gauges_tell_what_is_under_way(serve):
    server = serve()
    with under_way(server):
        found = scraped(server)
    assert found["vllm:num_requests_running"][0][1] == 1 and found["vllm:num_requests_waiting"][0][1] == 0
    assert found["minillm:requests_admitted"][0][1] == 1
    assert 0 < found["vllm:kv_cache_usage_perc"][0][1] < 1


def test_adapters_have_a_label_and_are_listed(serve, engine, monkeypatch):
    monkeypatch.setattr("minillm.engine.serving_counters.adapter_of", lambda request: "pirate")
    counters = ServingCounters(engine.llm)
    monkeypatch.setattr(engine, "counters", counters)
    monkeypatch.setattr(engine.llm, "counters", counters)
    server = serve()
    ask(server)
    settle(engine)
    found = scraped(server)
    assert ({"model_name": MODEL, "engine": "0", "adapter": "pirate"}, 6) in found["vllm:generation_tokens_total"]
    ((labels, _),) = found["vllm:lora_requests_info"]
    assert labels == {"model_name": MODEL, "max_lora": "0", "waiting_lora_adapters": "", "running_lora_adapters": ""}


def test_draft_tokens_are_counted():
    speculative_config = {"method": "ngram", "num_speculative_tokens": 3}
    llm = LLM(MODEL, dtype="float32", device="cpu", num_kv_blocks=50, speculative_config=speculative_config)
    same = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logit_bias={20: 100.0})  # drafts are right
    engine = AsyncLLM(llm)
    try:
        with RunningServer(engine) as server:
            engine.thread.submit("Once", same).output(PATIENCE)
            wait_until(lambda: value(server, "vllm:generation_tokens_total") == 30)
            found = scraped(server)
    finally:
        engine.shutdown()
    steps = found["vllm:iteration_tokens_total_count"][0][1]
    assert steps < 30  # several tokens in a step: one gap, however many
    assert found["vllm:inter_token_latency_seconds_count"][0][1] == steps - 1
    assert found["vllm:time_to_first_token_seconds_count"][0][1] == 1
    accepted = found["vllm:spec_decode_num_accepted_tokens_total"][0][1]
    drafted = found["vllm:spec_decode_num_draft_tokens_total"][0][1]
    assert 0 < accepted <= drafted and found["vllm:spec_decode_num_drafts_total"][0][1] <= steps
    by_position = {one["position"]: count for one, count in found["vllm:spec_decode_num_accepted_tokens_per_pos_total"]}
    assert sum(by_position.values()) == accepted and set(by_position) == {"0", "1", "2"}


def test_a_distribution_has_limits_of_its_own():
    distribution = Distribution((1, 2, 5))
    for number, times in ((1, 2), (3, 1), (9, 4)):
        distribution.add(number, times)
    metric = distribution.metric("x")
    assert metric.buckets == {"1": 2, "2": 2, "5": 3, "+Inf": 7} and (metric.count, metric.sum) == (7, 41)
    assert lengths_up_to(256) == (1, 2, 5, 10, 20, 50, 100, 200) and lengths_up_to(9) == (1, 2, 5)
