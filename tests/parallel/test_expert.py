"""Expert parallel: placements, and processes that exchange tokens and give what one process gives, bit for bit."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, strategies as st

from minillm.model.checkpoint import load_model
from minillm.model.routing import record_routing
from minillm.parallel.collectives import all_gather, reduce_scatter
from minillm.parallel.expert import dispatch_bytes, shared_expert_cost
from minillm.parallel.links import run_threads
from minillm.parallel.placement import Placement, count_copies, even_placement, place_experts
from tests.helpers.expert_ranks import run_rank
from tests.helpers.model_zoo import save_checkpoint
from tests.helpers.tiny import examples

# Placement


def test_an_even_placement_and_its_imbalance():
    placement = even_placement(6, 3)
    assert placement.ranks == ((0, 1), (2, 3), (4, 5)) and placement.hosts[3] == (1,)
    assert placement.imbalance([1] * 6) == 1 and placement.imbalance([6, 0, 0, 0, 0, 0]) == 3
    with pytest.raises(ValueError, match="4 ranks do not divide 6 experts"):
        even_placement(6, 4)


def test_a_hot_expert_has_copies_that_share_its_load():
    load = [70.0, 10.0, 10.0, 10.0]
    assert even_placement(4, 2).imbalance(load) == pytest.approx(1.6)
    placement = place_experts(load, 2, 3)
    assert placement.hosts[0] == (0, 1) and placement.imbalance(load) == pytest.approx(1.0)


@examples(150)
@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_every_placement_is_whole_and_wastes_no_room(num_ranks, experts_each, data):
    num_experts = data.draw(st.integers(experts_each, num_ranks * experts_each))
    load = data.draw(st.lists(st.floats(0, 1e6), min_size=num_experts, max_size=num_experts))
    placement = place_experts(load, num_ranks, experts_each)
    assert len(placement.ranks) == num_ranks and placement.num_experts == num_experts
    for held in placement.ranks:
        assert len(held) == len(set(held)) == experts_each
    assert all(placement.hosts), "an expert is nowhere"
    assert sum(placement.loads(load)) == pytest.approx(sum(load))
    assert [len(hosts) for hosts in placement.hosts] == count_copies(load, num_ranks * experts_each, num_ranks)


def test_copies_are_better_than_none_on_skewed_loads():
    rng = random.Random(0)
    for _ in range(30):
        load = [rng.paretovariate(1.2) for _ in range(16)]
        plain, better = even_placement(16, 4).imbalance(load), place_experts(load, 4, 6).imbalance(load)
        assert better <= plain and better < 1.6


def test_a_small_placement_is_close_to_the_best_one():
    """Against every placement of the same copies on two ranks."""
    rng = random.Random(1)
    for _ in range(20):
        load = [rng.random() for _ in range(6)]
        found = place_experts(load, 2, 3).imbalance(load)
        best = min(
            max(sum(one for one, at in zip(load, where) if at == rank) for rank in (0, 1)) * 2 / sum(load)
            for where in product((0, 1), repeat=6)
            if sum(where) == 3
        )
        assert found <= 4 / 3 * best + 1e-9


@pytest.mark.parametrize(
    "arguments, said",
    [
        (([1.0] * 5, 2, 2), "2 ranks of experts_each=2 hold 4 of 5 experts; raise experts_each to 3"),
        (([1.0] * 2, 2, 3), "experts_each=3 is not allowed; allowed: up to the 2 there are"),
    ],
)
def test_room_that_does_not_fit_is_named(arguments, said):
    with pytest.raises(ValueError, match=said):
        place_experts(*arguments)


# Processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dots1")
    save_checkpoint(folder, "dots1")  # with a shared expert, and 8 experts of which a token takes 3
    return folder


def run_ranks(folder, store, parts, placement=None) -> list:
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    arguments = (len(parts), str(store), folder, parts, placement, results)
    processes = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(len(parts))]
    try:
        for process in processes:
            process.start()
        answers = sorted((results.get() for _ in processes), key=lambda answer: answer[0])
        for process in processes:
            process.join(60)
        return answers
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("placement", [None, ((0, 1, 2, 3, 4), (3, 4, 5, 6, 7))], ids=["even", "copies"])
def test_tokens_on_several_ranks_are_computed_as_by_one_process(placement, folder, tmp_path):
    """One rank has fewer tokens; every row that leaves a rank is counted, and every byte."""
    torch.manual_seed(0)
    parts = [torch.randn(count, 48) for count in (23, 9)]
    model = load_model(folder, "float32", "cpu")
    mlp = model.layers[model.config.moe.layers[-1]].mlp
    answers = run_ranks(folder, tmp_path / "store", parts, placement)
    sent = [answer[2] for answer in answers]
    for (rank, out, rows, num_bytes), part in zip(answers, parts):
        assert not isinstance(out, str), out
        with torch.inference_mode(), record_routing(model) as recorder:
            assert torch.equal(torch.from_numpy(out), mlp(part)), f"rank {rank}"
        if placement is None:
            chosen = recorder.chosen[mlp.layer][0]
            assert rows == int((chosen // 4 != rank).sum()), "each choice of an expert of the other rank is a row"
        assert num_bytes == dispatch_bytes(rows, sent[1 - rank], 48, 4, 2)
    assert min(sent) > 0


def test_a_placement_of_another_size_is_refused(folder, tmp_path):
    [answer] = run_ranks(folder, tmp_path / "store", [torch.randn(2, 48)], ((0, 1), (2, 3)))
    assert "a placement of 4 experts on 2 ranks does not fit 8 experts on 1 ranks" in answer[1]


def test_a_rank_without_tokens_takes_part(folder, tmp_path):
    parts = [torch.randn(0, 48), torch.randn(5, 48)]
    answers = run_ranks(folder, tmp_path / "store", parts)
    assert answers[0][1].shape == (0, 48) and answers[1][1].shape == (5, 48)


def test_a_shared_expert_that_is_cut_saves_memory_and_sends_every_token_to_every_rank(folder):
    """Which is why it is whole on each rank. The sums are nearly the same, and the bytes are counted."""
    torch.manual_seed(1)
    model, ranks, parts = load_model(folder, "float32", "cpu"), 4, [torch.randn(5, 48) for _ in range(4)]
    moe, mlp = model.config.moe, model.layers[model.config.moe.layers[-1]].mlp
    shared, each = mlp.shared_expert, moe.shared_intermediate_size // 4
    gate_up, down = shared.gate_up_proj.weight.unflatten(0, (2, -1)), shared.down_proj.weight

    def compute(link, part):
        mine = slice(link.rank * each, (link.rank + 1) * each)
        x = all_gather(link, part).flatten(0, 1)
        gate, up = (x @ matrix[mine].T for matrix in gate_up)
        made = (torch.nn.functional.silu(gate) * up) @ down[:, mine].T
        return reduce_scatter(link, made).view(part.shape), link.sent.bytes

    with torch.inference_mode():
        answers = run_threads(compute, [(part,) for part in parts])
        for rank, (out, num_bytes) in enumerate(answers):
            torch.testing.assert_close(out, mlp.shared(parts[rank]), rtol=1e-4, atol=1e-4)
            whole, cut = (shared_expert_cost(moe, 48, 4, [5] * ranks, rank, is_cut) for is_cut in (False, True))
            assert cut[1] == num_bytes == 2 * 3 * 5 * 48 * 4 and whole[1] == 0
            assert whole[0] == ranks * cut[0] == sum(view.nbytes for view in (gate_up, down))


def test_hosts_of_a_placement():
    assert Placement(((0, 1), (1, 2))).hosts == ((0,), (0, 1), (1,))
