"""A request whose keys and values leave layer by layer while its prompt is computed goes on elsewhere as if it had not
moved, and neither engine keeps anything."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.book.roads.models import write_models
from minillm.engine import handover
from minillm.engine.layerwise import Departing, LayerwiseExecutor, pack, write_layer
from minillm.kv_cache.prefix import extend_chain, root_hash

PROMPT = [5 + place % 90 for place in range(37)]
PARAMS = SamplingParams(temperature=0.8, seed=4, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


class Told:
    """Hears the tokens of a request."""

    def __init__(self):
        self.token_ids, self.finish_reason = [], None

    def take(self, delta) -> None:
        self.token_ids += [] if delta.token_id is None else [delta.token_id]
        self.finish_reason = delta.finish_reason

    def fail(self, error) -> None:
        raise error


class Pair:
    """A source that hands over layers, and a destination that writes them."""

    def __init__(self, models, model: str, **settings):
        settings = dict(dtype="float32", device="cpu", max_model_len=64, num_kv_blocks=40, block_size=4) | settings
        self.source, self.target = (LLM(models / model, **settings) for _ in range(2))
        engine = self.source.engine
        engine.executor = self.executor = LayerwiseExecutor(engine.runner, engine.kv_cache.tables)
        self.pieces = []

    def hashes(self, token_ids: list[int]) -> list[bytes]:
        kv_cache, hashes = self.target.engine.kv_cache, []
        root = root_hash(identity=kv_cache.identity, block_size=4, salt=None)
        extend_chain(hashes, root, token_ids, 4, (len(token_ids) - 1) // 4)
        return hashes

    def serve(self, token_ids: list[int], num_cached: int = 0) -> list[int]:
        """The tokens of a request that begins in the source and goes on in the target."""
        [request] = self.source.inputs.requests({"prompt_token_ids": token_ids}, PARAMS)
        hashes, name, engine = self.hashes(token_ids), request.request_id, self.target.engine
        blocks = handover.reserve(engine, name, hashes, num_cached, len(token_ids) + 4)

        def arrive(piece) -> None:
            self.pieces.append(piece)
            data = pack(piece.parts.wait())
            write_layer(engine.runner.cache, piece.layer, blocks[piece.first : piece.first + piece.count], data)

        self.executor.depart(name, Departing(num_cached, arrive))
        begun, told = Told(), Told()
        self.source.outputs.add_raw(request, begun)
        while not begun.token_ids:
            engine.step()
            self.source.step_once()
        num_tokens = handover.num_certain_tokens(request)
        del self.executor.departing[name]
        self.source.outputs.raw.pop(name)
        self.source.engine.finish("abort", request)
        resumed = handover.resumed(request.spec, begun.token_ids)
        assert handover.take_reserved(engine, name, resumed, hashes, num_tokens)
        assert num_tokens == len(token_ids) + len(begun.token_ids) - 1 and resumed.num_computed_tokens == num_tokens
        self.target.outputs.raw[name] = told
        while told.finish_reason is None:
            self.target.step_once()
        return begun.token_ids + told.token_ids

    def check_idle(self) -> None:
        for llm in (self.source, self.target):
            llm.engine.step()
            llm.engine.scheduler.check_integrity()
            pool = llm.engine.kv_cache.pool
            assert pool.num_free == pool.num_blocks and not llm.engine.kv_cache.reserved


SETTINGS = {
    "one step": dict(attention_backend="torch"),
    "chunks of 7": dict(max_num_batched_tokens=7),
    "codes": dict(kv_cache_dtype="int8", max_num_batched_tokens=16),
    "whole layers in C": dict(attention_backend="auto"),
    "launched ahead": dict(async_scheduling=True, max_num_batched_tokens=9),
    "no prefix cache": dict(enable_prefix_caching=False),
}


@pytest.mark.parametrize("model", ["llama", "qwen3", "deepseek"])
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_one_engine(name, model, models):
    pair = Pair(models, model, **SETTINGS[name])
    alone = LLM(models / model, dtype="float32", device="cpu", max_model_len=64, num_kv_blocks=40,
                kv_cache_dtype=SETTINGS[name].get("kv_cache_dtype", "auto"))  # fmt: skip
    [wanted] = alone.generate({"prompt_token_ids": PROMPT}, PARAMS, use_tqdm=False)
    assert pair.serve(PROMPT) == wanted.outputs[0].token_ids
    pair.check_idle()


def test_a_layer_leaves_before_the_next_one_computes(models):
    pair = Pair(models, "qwen3", max_num_batched_tokens=16)
    events, arrived, layers = [], [], pair.source.model.layers
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, index=index: events.append(("computes", index)))

    class Pieces(list):
        def append(self, piece) -> None:
            events.append(("left", piece.layer))
            arrived.append(piece)

    pair.pieces = Pieces()
    pair.serve(PROMPT)
    prompt = events[: events.index(("computes", 0), events.index(("left", len(layers) - 1)))]
    assert prompt == [event for index in range(len(layers)) for event in (("computes", index), ("left", index))]
    spans = [(piece.first, piece.first + piece.count) for piece in arrived if piece.layer == 0]
    assert spans[:3] == [(0, 4), (4, 8), (8, 10)] and all(end >= first for (_, end), (first, _) in pairwise(spans))


def test_blocks_that_the_destination_has_are_not_sent_and_those_of_a_prefix_cache_are(models):
    """The source has the whole head in its prefix cache, the destination a part of it."""
    pair = Pair(models, "llama")
    whole = pair.serve(PROMPT)
    pair.target.reset_prefix_cache()
    pair.target.generate({"prompt_token_ids": PROMPT[:13]}, SamplingParams(max_tokens=1), use_tqdm=False)
    pair.pieces.clear()
    assert pair.serve(PROMPT, num_cached=3) == whole
    assert {(piece.first, piece.count) for piece in pair.pieces} == {(3, 7)}
    for llm in (pair.source, pair.target):  # and where the source computes all of it, the same
        llm.reset_prefix_cache()
    pair.target.generate({"prompt_token_ids": PROMPT[:13]}, SamplingParams(max_tokens=1), use_tqdm=False)
    pair.pieces.clear()
    assert pair.serve(PROMPT, num_cached=3) == whole
    assert {(piece.first, piece.count) for piece in pair.pieces} == {(3, 7)}
    pair.check_idle()


def test_blocks_that_are_not_there_or_too_many_are_not_reserved(models):
    pair = Pair(models, "llama")
    engine, hashes = pair.target.engine, pair.hashes(PROMPT)
    assert handover.reserve(engine, "a", hashes, 1, len(PROMPT)) is None  # block 0 is not in its prefix cache
    assert handover.reserve(engine, "a", hashes, 0, 4 * 21) is None  # 21 of 40 blocks
    assert len(handover.reserve(engine, "a", hashes, 0, 4 * 20)) == 20
    assert handover.reserve(engine, "b", hashes, 0, 4 * 11) is None
    handover.release(engine, "a")
    handover.release(engine, "a")
    pair.check_idle()
    cache = engine.runner.cache
    with pytest.raises(ValueError, match="8 bytes are not 2 blocks of a layer"):
        write_layer(cache, 0, [1, 2], torch.zeros(8, dtype=torch.uint8))


def test_a_full_batch_leaves_the_blocks_in_the_prefix_cache(models):
    pair = Pair(models, "llama", max_num_seqs=1)
    [other] = pair.target.inputs.requests({"prompt_token_ids": [7, 8]}, PARAMS)
    pair.target.outputs.add_raw(other, Told())
    pair.target.step_once()
    engine, hashes = pair.target.engine, pair.hashes(PROMPT)
    blocks = handover.reserve(engine, "a", hashes, 0, len(PROMPT))
    [request] = pair.target.inputs.requests({"prompt_token_ids": PROMPT}, PARAMS)
    assert not handover.take_reserved(engine, "a", request, hashes, len(PROMPT))
    assert [engine.kv_cache.pool.lookup(one) for one in hashes] == blocks[: len(hashes)]
    engine.scheduler.check_integrity()
