"""Cold prefixes on their way: copies, and whole engines with less memory than they need."""

from __future__ import annotations

import random
import warnings

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.engine.metrics import RequestRecord, report
from minillm.kv_cache.disk import HEADER, DiskStore
from minillm.kv_cache.manager import BlockMoves
from minillm.kv_cache.paged import PagedKVCache
from minillm.kv_cache.transfer import BlockTransfer
from tests.helpers.tiny import VOCAB_SIZE, save_tiny_llama


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8", "int4"])
@pytest.mark.parametrize("shape", [(2, 16, 4), (1, 6, 7)], ids=["even", "odd"])
def test_a_block_comes_back_as_it_went_by_every_way(kv_dtype, shape, tmp_path):
    """Through host memory and through disk, with whatever a block is made of."""
    heads, dim, size = shape
    cache = PagedKVCache(2, heads, dim, 4, size, torch.float32, kv_dtype=kv_dtype)
    generator = torch.Generator().manual_seed(0)
    for part in cache.parts.values():
        for layer in part:
            layer[1:].view(torch.uint8).random_(0, 120, generator=generator)
    store = DiskStore(tmp_path, 10**6, cache.bytes_per_block, "x")
    transfer = BlockTransfer(cache, 3, store)
    assert transfer.bytes_per_block == cache.bytes_per_block

    def content(number: int) -> list[bytes]:
        return [
            layer[number].contiguous().view(torch.uint8).numpy().tobytes()
            for part in cache.parts.values()
            for layer in part
        ]

    first, second, third = content(1), content(2), content(3)
    transfer.move(BlockMoves(swap_out=[(1, 2), (2, 0)]))
    # In one step: a place goes to disk and takes another block, and what was there comes back to the device.
    transfer.move(BlockMoves(to_disk=[(2, bytes(32))], swap_out=[(3, 2)], copies=[(3, 1)], swap_in=[(0, 3), (2, 2)]))
    assert content(1) == third and content(3) == second and content(2) == third
    store.keep(bytes(32), store.fetch(bytes(32)).result())
    transfer.move(BlockMoves(from_disk=[(bytes(32), 1)], swap_in=[(1, 4)]))
    assert content(4) == first and not any(map(any, content(0)))
    counts = {"swap_out": 3, "to_disk": 1, "from_disk": 1, "swap_in": 3}
    assert transfer.bytes_moved == {kind: count * cache.bytes_per_block for kind, count in counts.items()}
    store.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(folder, eos_token_id=VOCAB_SIZE - 1)
    return str(folder)


PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [3 + (i * 7 + j * (1 + i)) % 250 for j in range(20 + 3 * i)]} for i in range(6)]


def ask(llm: LLM, prompts=PROMPTS, together: bool = True) -> tuple[list[list[int]], list[dict[str, int]]]:
    groups = [prompts] if together else [[prompt] for prompt in prompts]
    outputs = [output for group in groups for output in llm.generate(group, PARAMS, use_tqdm=False)]
    llm.engine.scheduler.check_integrity()
    return [output.outputs[0].token_ids for output in outputs], [output.metrics.cached_tokens for output in outputs]


@pytest.fixture(scope="module")
def expected(folder):
    return ask(LLM(folder, device="cpu", dtype="float32", enable_prefix_caching=False))[0]


def tiered(folder, disk_path=None, host_blocks=8, **settings) -> LLM:
    common = dict(device="cpu", dtype="float32", block_size=4)
    settings = common | dict(num_kv_blocks=14) | settings
    block_bytes = LLM(folder, **common, num_kv_blocks=10).engine.runner.cache.bytes_per_block
    if disk_path is not None:
        settings |= dict(disk_kv_path=disk_path, disk_kv_bytes=10**7)
    return LLM(folder, host_kv_bytes=host_blocks * block_bytes, **settings)


@pytest.mark.parametrize("disk", [False, True], ids=["host", "host and disk"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_tokens_are_the_same_with_tiers(folder, expected, tmp_path, disk, mode, ahead):
    llm = tiered(folder, tmp_path / "kv" if disk else None, preemption_mode=mode, async_scheduling=ahead)
    llm.trace.enabled = True
    for _ in range(3):
        assert ask(llm)[0] == expected
    again, found = ask(llm, together=False)
    assert again == expected
    again, found = ask(llm, [*PROMPTS[4:], *PROMPTS], together=False)
    assert again == [*expected[4:], *expected]
    assert sum(one["disk" if disk else "host"] for one in found) > 0
    moved = {
        kind: sum(llm.trace.totals(kind).values())
        for kind in ("swap_out", "swap_in", "to_disk", "from_disk", "preempted")
    }
    assert (
        moved["preempted"] > 0 and moved["swap_out"] > 0 and moved["swap_in"] > 0 and (moved["from_disk"] > 0) == disk
    )
    assert (
        llm.engine.runner.transfer.bytes_moved["swap_in"] == moved["swap_in"] * llm.engine.runner.cache.bytes_per_block
    )
    counted, told = (
        llm.engine.kv_cache.tiers.found,
        {tier: sum(llm.trace.totals(f"found on {tier}").values()) for tier in ("host", "disk")},
    )
    assert (
        counted.host >= told["host"]
        and counted.disk >= told["disk"]
        and counted.hit_rate("disk" if disk else "host") > 0
    )


def test_counts_by_tier_reach_the_metrics(folder, expected, tmp_path):
    """A, B, A again with device memory for one and host memory for one and a bit."""
    llm = tiered(folder, tmp_path / "kv", host_blocks=7, num_kv_blocks=9)
    (one, other), (said, as_well) = PROMPTS[:2], expected[:2]

    def cached(prompt, answer):
        [output] = llm.generate(prompt, PARAMS, use_tqdm=False)
        assert output.outputs[0].token_ids == answer
        assert output.metrics.num_cached_tokens == sum(output.metrics.cached_tokens.values())
        return output

    assert cached(one, said).metrics.cached_tokens == {"device": 0, "host": 0, "disk": 0}
    assert cached(other, as_well).metrics.cached_tokens == {"device": 0, "host": 0, "disk": 0}
    output = cached(one, said)
    # Of 20 tokens four blocks may be hits, since the last token is computed. The head of the text went last.
    assert output.metrics.cached_tokens == {"device": 4, "host": 12, "disk": 0}
    summed = report([RequestRecord.of(output)])
    assert summed.hit_rate == 0.8 and summed.tier_hit_rates == {"device": 0.2, "host": 0.6, "disk": 0.0}
    cached(other, as_well), cached(PROMPTS[2], expected[2])
    assert cached(one, said).metrics.cached_tokens["disk"] > 0


def test_the_next_process_starts_with_what_the_disk_has(folder, expected, tmp_path):
    first = tiered(folder, tmp_path / "kv")
    ask(first), ask(first)
    first.engine.kv_cache.tiers.disk.close()
    num_files = len(list((tmp_path / "kv").iterdir()))
    assert num_files > 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = tiered(folder, tmp_path / "kv", num_kv_blocks=60, host_blocks=60)
    assert len(second.engine.kv_cache.tiers.disk) == num_files
    said, found = ask(second)
    assert said == expected and sum(one["disk"] for one in found) > 0 and sum(one["host"] for one in found) == 0
    second.engine.kv_cache.tiers.disk.close()
    save_tiny_llama(tmp_path / "other", seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = tiered(str(tmp_path / "other"), tmp_path / "kv")
    disk = other.engine.kv_cache.tiers.disk
    assert len(disk) == 0 and len(disk.others) == num_files  # no hits, but they take their part of the room


def test_damage_on_disk_costs_time_and_nothing_else(folder, expected, tmp_path):
    first = tiered(folder, tmp_path / "kv")
    ask(first), ask(first)
    first.engine.kv_cache.tiers.disk.close()
    for number, path in enumerate(sorted((tmp_path / "kv").iterdir())):
        content = bytearray(path.read_bytes())
        if number % 2:
            content[HEADER.size + number % 50] ^= 255
            path.write_bytes(content)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert ask(tiered(folder, tmp_path / "kv", num_kv_blocks=60, host_blocks=60))[0] == expected
    assert any("its bytes are not those that were written" in str(one.message) for one in said)


def test_a_failed_step_leaves_nothing_in_host_memory_that_was_not_copied(folder, expected, tmp_path, monkeypatch):
    llm = tiered(folder, tmp_path / "kv")
    ask(llm)
    monkeypatch.setattr(llm.engine.runner.transfer, "move", lambda moves: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ask(llm)
    monkeypatch.undo()
    assert not llm.engine.kv_cache.host.cached
    assert ask(llm)[0] == expected


@pytest.mark.parametrize("settings, said", [
    (dict(disk_kv_bytes=5), "disk_kv_bytes=5 has no place to be: give disk_kv_path"),
    (dict(disk_kv_path="x", host_kv_bytes=1), "disk_kv_path='x' needs disk_kv_bytes in bytes, it is 0"),
    (dict(disk_kv_path="x", disk_kv_bytes=5),
     "disk_kv_path='x' needs host_kv_bytes in bytes, it is 0: blocks go to disk through"),
    (dict(disk_kv_path="x", disk_kv_bytes=5, host_kv_bytes=5, enable_prefix_caching=False),
     "enable_prefix_caching=False; drop either"),
    (dict(host_kv_bytes=10**6, enable_prefix_caching=False),
     "host_kv_bytes=1000000 would hold nothing: enable_prefix_caching=False, and preemption_mode='recompute'"),
    (dict(host_kv_bytes=10**6, kv_retention={"sinks": 4, "window": 60}),
     "host_kv_bytes=1000000 would hold nothing: kv_retention keeps no prefixes"),
    (dict(disk_kv_path="x", disk_kv_bytes=-1), "disk_kv_bytes=-1"),
    (dict(host_kv_bytes=1), "host_kv_bytes=1 holds no block"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(folder, settings, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=said):
        LLM(folder, device="cpu", **settings)
    with pytest.raises(TypeError, match="disk_kv_path=5 is not allowed"):
        LLM(folder, device="cpu", disk_kv_path=5)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", [2, 3])
def test_a_swapped_request_whose_window_was_evicted_says_the_same(tmp_path, seed):
    """Four prompts share a head longer than the window. One is swapped, and its shared blocks are evicted meanwhile."""
    save_tiny_llama(
        tmp_path,
        1,
        model_type="mistral",
        sliding_window=24,
        num_hidden_layers=3,
        head_dim=16,
        eos_token_id=VOCAB_SIZE - 1,
    )
    rng = random.Random(seed)
    tokens = lambda count: [rng.randrange(3, 290) for _ in range(count)]
    head = tokens(64)
    texts = [head + tokens(rng.randint(1, 26)) for _ in range(4)] + [tokens(rng.randint(3, 90)) for _ in range(7)]
    rng.shuffle(texts)
    prompts, params = (
        [{"prompt_token_ids": text} for text in texts],
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    )
    common = dict(device="cpu", dtype="float32", block_size=4, max_model_len=128, async_scheduling=False)
    plenty = LLM(tmp_path, **common, num_kv_blocks=1000, enable_prefix_caching=False)
    few = LLM(tmp_path, **common, num_kv_blocks=34, preemption_mode="swap", host_kv_bytes=2**24)
    expected, cold, warm = (
        [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        for llm in (plenty, few, few)
    )
    assert cold == expected and warm == expected
