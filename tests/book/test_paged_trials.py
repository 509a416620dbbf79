"""What chapter 13 tries its kernels on: only a sequence's own keys and values are numbers; reports are told as is."""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace

import pytest
import torch

from minillm.book import paged_layouts, paged_trials
from minillm.kernels import language
from minillm.kernels.build import Report
from minillm.kernels.gpus import GPUS
from minillm.kernels.paged_decode import choose_tile

LENGTHS = [1, 16, 37]
LOG2_E = 1 / math.log(2)  # the kernel's exponentials are powers of two


def gathered(pages, row: int, length: int):
    """The keys and values of a sequence, each [kv_heads, length, head_dim]."""
    keys, values, table, _ = pages
    k = keys[table[row]].permute(1, 0, 3, 2).flatten(1, 2)[:, :length]
    return k, values[table[row]].transpose(0, 1).flatten(1, 2)[:, :length]


def test_random_pages_have_numbers_at_the_sequences_positions_alone():
    pages = paged_trials.random_pages(LENGTHS, kv_heads=2, head_dim=8, block_size=16)
    keys, values, table, lens = pages
    assert lens.tolist() == LENGTHS and table.shape == (3, 3)
    for row, length in enumerate(LENGTHS):
        assert all(torch.isfinite(x).all() for x in gathered(pages, row, length))
    for x in (keys, values):
        assert int(torch.isfinite(x).sum()) == sum(LENGTHS) * 2 * 8, "all else is NaN"
    blocks = [int(table[row, place]) for row, length in enumerate(LENGTHS) for place in range(-(-length // 16))]
    assert len(set(blocks)) == 5 and 0 not in blocks and blocks != sorted(blocks)


def test_no_sequence_owns_block_0():
    assert all(0 not in paged_trials.random_pages([80], head_dim=1, seed=seed)[2] for seed in range(30))


def test_a_seed_decides_the_pages():
    one, same, other = (paged_trials.random_pages([20], seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(one, same))
    assert not torch.equal(one[0].nan_to_num(), other[0].nan_to_num())


def test_random_cases_fit_together_and_reach_every_kind():
    cases = [paged_trials.random_case(seed) for seed in range(40)]
    for q, (keys, values, table, lens), *_ in cases:
        assert q.shape[0] == len(table) == len(lens) and q.shape[1] % keys.shape[1] == 0
        assert q.shape[2] == keys.shape[2] == values.shape[3] and keys.shape[3] == values.shape[2]
        assert q.dtype == keys.dtype == values.dtype and torch.isfinite(q).all()
    assert {case.num_splits for case in cases} == {1, 2, 4} and {case.window for case in cases} == {None, 20}
    assert {(case.q.dtype, case.atol) for case in cases} == {(torch.float32, 1e-5), (torch.float16, 4e-3)}
    assert {len(case.q) for case in cases} == {1, 2}


def test_sequences_of_a_shared_batch_share_their_first_pages_alone():
    queries, keys, values, tables, lengths = paged_trials.shared_batch(3, shared=32, own=20)
    assert queries.shape == (3, 1, 4, 32) and lengths == [52] * 3 and tables.shape == (3, 4)
    assert (tables[:, :2] == tables[0, :2]).all()
    assert len(set(tables[:, 2:].flatten().tolist())) == 6
    for row, length in enumerate(lengths):
        assert all(torch.isfinite(x).all() for x in gathered((keys, values, tables, None), row, length))


def test_latents_lie_in_their_pages_in_order():
    case = paged_trials.random_latents(length=20, heads=3, rank=6, rope=2, nope=4)
    assert [x.shape for x in case[:5]] == [(3, 4), (3, 2), (3, 4, 6), (3, 4, 6), (20, 8)]
    assert torch.equal(case.pages[case.table].flatten(0, 1)[:20], case.latents)
    assert int(torch.isfinite(case.pages).sum()) == 20 * 8 and 0 not in case.table


def test_the_latent_decoder_has_the_same_random_weights_each_time():
    one, same = (paged_trials.latent_decoder().checkpoint_views() for _ in range(2))
    assert any("layers.1." in name for name in one) and not any("layers.2." in name for name in one)
    for name, weight in one.items():
        assert torch.equal(weight, same[name]), name
        assert 0.1 < weight.std() < 0.3, name


def test_traffic_is_told_in_kb_with_its_sum():
    ops = [("index", 132_000, 131_000), ("clone", 131_400, 130_600)]
    rows = paged_trials.traffic_rows(SimpleNamespace(ops=ops, bytes_read=263_400, bytes_written=261_600))
    assert rows == [
        ("index", "gather the keys", "132", "131"),
        ("clone", "turn them into one piece", "131", "131"),
        ("all", "", "263", "262"),
    ]


@pytest.fixture
def jobs(monkeypatch) -> list:
    """What is to be compiled; reports come back that name their place."""
    seen = []

    def build_all(wanted):
        seen.extend(wanted)
        return [Report(str(place), job.capability, 4, job.num_stages) for place, job in enumerate(wanted)]

    monkeypatch.setattr(paged_layouts, "build_all", build_all)
    return seen


def test_each_layout_is_compiled_as_it_is_named(jobs):
    built = paged_layouts.build_layouts(capability=90)
    assert [report.name for report in built.values()] == ["0", "1", "2", "3"]
    assert list(built)[-1] == "the package's kernel" and {job.capability for job in jobs} == {90}
    tile, stages = choose_tile(128, 2, 2, 90)
    for name, job in zip(built, jobs[:3]):
        assert job.constants["TURNED"] == name.startswith("keys turned")
        assert job.constants["WHOLE"] == name.endswith("whole blocks")
        assert job.constants["TILE"] == jobs[3].constants["TILE_N"] == tile and job.num_stages == stages


@pytest.mark.skipif(language.MODE == "absent", reason="Triton needs Linux")
def test_every_parameter_of_a_kernel_has_a_type_or_a_value(jobs):
    paged_layouts.build_layouts()
    for job in jobs:
        given, parameters = set(job.signature) | set(job.constants), inspect.signature(job.kernel.fn).parameters
        missing = {
            name for name in parameters if name not in given and parameters[name].default is inspect.Parameter.empty
        }
        assert not missing and given <= set(parameters), job.kernel


def test_each_gpu_gets_the_kernel_for_itself(jobs):
    built = paged_layouts.build_decode("T4", "H100")
    assert [(gpu.name, report.name) for gpu, report in built] == [(GPUS["T4"].name, "0"), (GPUS["H100"].name, "1")]
    assert [job.capability for job in jobs] == [75, 90]


def test_fit_counts_programs_for_the_bytes_of_a_microsecond():
    gpu = GPUS["A100"]
    report = Report("paged_decode", 80, num_warps=4, num_stages=2, registers=128, shared_bytes=40 * 1024,
                    ptx="cp.async.cg.shared.global [a], [b], 16;\ncp.async.commit_group ;")  # fmt: skip
    row = paged_layouts.fit(gpu, report, in_flight=32_768)
    assert row["fit on an SM"] == 4 and row["limited by"] == "registers", "65,536 registers hold 4 x 4 warps of 128"
    assert row["async copies"] == 1 and row["shared"] == "40 KB"
    needed = math.ceil(gpu.memory_bandwidth * 1e-6 / 32_768)
    assert row["programs for that / places"] == f"{needed} / {4 * gpu.num_sms}"


@pytest.mark.skipif(language.MODE == "absent", reason="Triton needs Linux")
@pytest.mark.parametrize("variant", paged_layouts.VARIANTS)
def test_every_layout_attends(variant):
    flags, length = paged_layouts.VARIANTS[variant], 37
    pages = paged_trials.random_pages([length], head_dim=32)
    keys, values, table, _ = pages
    q, scale = paged_trials.random_queries(1, 16, head_dim=32)[0], 0.25
    k, v = (x[0].double() for x in gathered(pages, 0, length))
    stored = keys if flags["TURNED"] else keys.transpose(2, 3).contiguous()
    out = torch.full((16, 32), float("nan"), device=q.device)
    paged_layouts.toy_layout_kernel[(1,)](
        q, stored, values, table, out, length, scale * LOG2_E, keys.stride(0), values.stride(0), **flags,
        DIM=32, BLOCK_SIZE=16, TILE=32,
    )  # fmt: skip
    expected = (q.double() @ k.T * scale).softmax(-1) @ v
    assert torch.allclose(out.double(), expected, atol=1e-5)
