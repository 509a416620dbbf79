"""The CPU's own kernels against their PyTorch twins, or float64, on odd shapes;
and what happens where there are none."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from minillm.kernels import native, native_quant
from minillm.kernels.native_structs import Pages, Sequences
from minillm.kv_cache.native_attention import NativeAttention
from minillm.kv_cache.paged import PagedKVCache
from minillm.kv_cache.torch_attention import TorchAttention
from minillm.model.attention import causal_attention
from minillm.model.batch import ForwardBatch
from minillm.model.checkpoint import load_model
from minillm.model.config import RopeConfig
from minillm.model.layers import Linear, RMSNorm, Rotary, SwiGLU, apply_rotary
from minillm.quantization.rtn import round_to_nearest
from minillm.sampling import noise
from tests.helpers.model_zoo import CHECKPOINTS, PLAIN, save_checkpoint
from tests.helpers.tiny import seeded
from tests.kernels.test_kernels_native_quant import pack as pack_codes

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler with OpenMP here: the twins serve")
TOLERANCE = {torch.float32: dict(rtol=1e-5, atol=1e-5), torch.bfloat16: dict(rtol=2e-2, atol=2e-2)}
both_dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture
def twins(monkeypatch):
    """Run something with the kernels switched off."""

    def run(function, *args):
        with monkeypatch.context() as patch:
            patch.setattr(native, "library", lambda dtype=None: None)
            return function(*args)

    return run


@both_dtypes
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 9, 31, 33, 70])
@pytest.mark.parametrize("shape", [(16, 16), (17, 5), (33, 40), (64, 1), (1, 30), (96, 250)], ids=str)
def test_linear_of_any_shape_equals_float64(shape, rows, dtype):
    torch.manual_seed(0)
    for bias in (False, True):
        layer = Linear(*shape, bias, dtype, torch.device("cpu"))
        for parameter in layer.parameters():
            parameter.normal_()
        weight, x = layer.weight.clone(), torch.randn(rows, shape[0]).to(dtype)
        expected = F.linear(x.double(), weight.double(), layer.bias.double() if bias else None)
        layer.prepare()
        assert layer.plain is None and torch.equal(layer.weight, weight)
        strided = torch.randn(rows, 2 * shape[0]).to(dtype)[:, ::2].copy_(x)
        for given_x in (x, strided):
            torch.testing.assert_close(
                layer(given_x).double(),
                expected,
                rtol=TOLERANCE[dtype]["rtol"],
                atol=1e-4 if dtype is torch.float32 else 0.3,
            )


@both_dtypes
@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 24), (40, 1000), (2, 7)], ids=str)
def test_norm_and_swiglu_equal_their_twins(shape, dtype, twins):
    torch.manual_seed(0)
    size = shape[-1]
    norm = RMSNorm(size, 1e-5, dtype, torch.device("cpu"))
    norm.weight.normal_()
    x = torch.randn(shape).to(dtype)
    inside = torch.randn(*shape[:-2], shape[-2] + 3, size).to(dtype)[..., 1 : 1 + shape[-2], :]  # a view with gaps
    for given_x in (x, inside, 1e4 * x, torch.zeros_like(x)):
        torch.testing.assert_close(norm(given_x), twins(norm, given_x), **TOLERANCE[dtype])
    mlp = SwiGLU(size, 13, False, dtype, torch.device("cpu"))
    for parameter in mlp.parameters():
        parameter.normal_()
    flat = x.view(-1, size)
    torch.testing.assert_close(
        mlp(flat).float(), twins(mlp, flat).float(), rtol=3e-2, atol=TOLERANCE[dtype]["atol"] * 100
    )
    gate = torch.tensor([[-200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 200.0] + [1.0] * 7])
    torch.testing.assert_close(native.silu_mul(gate), F.silu(gate[:, :7]), rtol=1e-6, atol=1e-30)


def test_gelu_equals_float64():
    gate = torch.linspace(-12, 12, 9999)
    made = native.gate_mul(torch.cat([gate, torch.full_like(gate, 3.0)])[None], "gelu_pytorch_tanh")
    expected = 3 * F.gelu(gate.double(), approximate="tanh")
    torch.testing.assert_close(made[0].double(), expected, rtol=3e-6, atol=1e-13)


@both_dtypes
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_swiglu_of_huge_gates(dtype, activation):
    """16 at a time, and the last ones one by one."""
    for gate, expected in ((-3e38, 0.0), (-1e30, 0.0), (-89.0, 0.0), (1e30, 1e30), (-float("inf"), float("nan"))):
        x = torch.cat([torch.full((1, 19), gate), torch.ones(1, 19)], dim=1).to(dtype)
        made, expected = native.gate_mul(x, activation).float(), torch.full((1, 19), expected).to(dtype).float()
        torch.testing.assert_close(made, expected, rtol=1e-2, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu"])
def test_an_activation_gives_a_row_the_same_bits_in_any_company(activation):
    """PyTorch's threads take equal parts of all numbers, from the middle of a row where they do not divide it."""
    torch.manual_seed(0)
    mlp = SwiGLU(4, 1531, False, torch.float32, torch.device("cpu"), activation=activation)
    for parameter in mlp.parameters():
        parameter.normal_()
    for linear in mlp.children():
        linear.prepare()
    x, threads = torch.randn(301, 4), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        alone = torch.cat([mlp(row[None]) for row in x])
        for rows in range(1, 302, 2):
            assert torch.equal(mlp(x[:rows]), alone[:rows])
    finally:
        torch.set_num_threads(threads)


@both_dtypes
def test_rotation_equals_its_twin_and_leaves_its_input(dtype, twins):
    rotary = Rotary(RopeConfig(theta=1e4), 24, dtype, torch.device("cpu"))
    positions = torch.tensor([0, 1, 7, 1000, 131071])
    cos, sin = rotary(positions)
    for got, expected in zip((cos, sin), twins(rotary, positions)):
        torch.testing.assert_close(got, expected, **TOLERANCE[dtype])
    x = torch.randn(5, 9, 24).to(dtype)
    before = x.clone()
    for view in (x, x[:, 2:6], x.transpose(0, 1).contiguous().transpose(0, 1)):
        torch.testing.assert_close(
            apply_rotary(view, cos, sin), twins(apply_rotary, view, cos, sin), **TOLERANCE[dtype]
        )
    assert torch.equal(x, before)


@both_dtypes
def test_no_tokens_make_no_result(dtype):
    """In a thread of its own: no call before has left memory there."""
    none, weight = torch.empty(0, 32, dtype=dtype), torch.randn(48, 32).to(dtype)
    rounded = round_to_nearest(weight.float(), "int8", None)
    whole_rows = pack_codes(rounded, dtype), pack_codes(rounded, dtype, "int8")
    q, kv = torch.empty(0, 4, 16, dtype=dtype), torch.empty(0, 2, 16, dtype=dtype)
    keys, values = torch.empty(2, 2, 16, 8, dtype=dtype), torch.empty(2, 2, 8, 16, dtype=dtype)
    index = torch.tensor([0]), torch.empty(0), torch.empty(0, 1), torch.empty(0)

    def run() -> list[tuple[int, ...]]:
        out = torch.empty(0, 48, dtype=dtype)
        lora = torch.randn(1, 4, 32).to(dtype), torch.randn(1, 48, 4).to(dtype)
        native.add_lora_(out, none, *lora, torch.empty(0, dtype=torch.int32))
        results = [native.linear(none, native.pack(weight), None, 48)]
        results += [native_quant.linear(none, matrix, None) for matrix in whole_rows]
        results += [native.rms_norm(none, weight[0], 1e-5), native.silu_mul(none)]
        results += [native.paged_attention(q, kv, kv, Pages.of(keys, values), Sequences.of(*index, 0))]
        return [tuple(result.shape) for result in results]

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(run).result() == [(0, 48)] * 3 + [(0, 32), (0, 16), (0, 4, 16)]


def test_noise_equals_its_twin_also_at_its_rarest(twins):
    seeds = torch.randint(0, 2**63 - 1, (40,), generator=torch.Generator().manual_seed(0))
    positions, token_ids = torch.arange(40) * 1000, torch.arange(20_000)
    got, expected = (
        noise.gumbel_noise(seeds, positions, token_ids),
        twins(noise.gumbel_noise, seeds, positions, token_ids),
    )
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)
    assert got.max() > 10 and got.min() < -2 and got.isfinite().all()


CACHED = st.integers(0, 40) | st.sampled_from([383, 384, 770])  # more than one block of keys
LENGTHS = st.lists(st.tuples(CACHED, st.integers(1, 20)), min_size=1, max_size=6)


@seeded
@given(
    LENGTHS,
    st.sampled_from([(1, 1, 16), (4, 2, 18), (6, 2, 32), (9, 3, 20), (20, 2, 40)]),
    st.sampled_from([1, 3, 7, 16, 32]),
    st.sampled_from([None, 1, 5, 17, 100]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 1000),
)
def test_both_attentions_over_pages_equal_the_formula(lengths, heads, block_size, window, dtype, seed):
    """Ragged batches of (positions cached, new tokens), pages scattered, everything unwritten poisoned."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads, head_dim = heads
    lengths = sorted(lengths, key=lambda length: length[1] > 1)  # decoding rows stand first
    counts = [-(-(before + new) // block_size) for before, new in lengths]
    blocks = (torch.randperm(sum(counts), generator=generator) + 1).split(counts)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
    for row, own in zip(table, blocks):
        row[: len(own)] = own

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    caches = [PagedKVCache(1, num_kv_heads, head_dim, sum(counts), block_size, dtype) for _ in range(2)]
    attentions = [NativeAttention(caches[0], [window]), TorchAttention(caches[1], [window], num_heads)]
    caches[0].keys[0].fill_(float("nan"))  # the kernel must never look at a slot that nobody wrote
    caches[0].values[0].fill_(float("nan"))
    slots, q, k, v, expected = [], [], [], [], []
    for (before, new), own in zip(lengths, blocks):
        positions = torch.arange(before + new)
        places = own[positions // block_size] * block_size + positions % block_size
        keys, values = random(before + new, num_kv_heads, head_dim), random(before + new, num_kv_heads, head_dim)
        queries = random(new, num_heads, head_dim)
        for cache in caches:
            cache.write(0, keys[:before], values[:before], places[:before])
        expected.append(causal_attention(queries.float(), keys.float(), values.float(), window))
        slots.append(places[before:])
        q.append(queries), k.append(keys[before:]), v.append(values[before:])
    news = [new for _, new in lengths]
    batch = ForwardBatch(
        token_ids=torch.zeros(sum(news), dtype=torch.int64),
        positions=torch.zeros(sum(news), dtype=torch.int64),
        query_start_loc=torch.tensor([0, *torch.tensor(news).cumsum(0)]),
        seq_lens=torch.tensor([before + new for before, new in lengths]),
        block_table=table,
        slot_mapping=torch.cat(slots),
        max_query_len=max(news),
        logits_indices=torch.tensor([0]),
        max_seq_len=max(before + new for before, new in lengths),
    )
    tolerance = 2e-5 if dtype is torch.float32 else 3e-2
    for attention in attentions:
        out = attention.attend(torch.cat(q), torch.cat(k), torch.cat(v), 0, batch)
        torch.testing.assert_close(out.float(), torch.cat(expected), rtol=tolerance, atol=tolerance)


@both_dtypes
@pytest.mark.parametrize("name", [*CHECKPOINTS, *PLAIN])
def test_a_layer_in_one_call_equals_the_layer_in_pieces(name, dtype, tmp_path):
    """Every family, in a batch of decoding rows, a whole prompt and the rest of one."""
    save_checkpoint(tmp_path, name)
    model = load_model(tmp_path, dtype, "cpu")
    assert all(layer.whole is not None for layer in model.layers)
    config, block_size = model.config, 4
    lengths = [(9, 1), (14, 1), (0, 7), (5, 6)]  # (positions cached, new tokens)
    counts = [-(-(before + new) // block_size) for before, new in lengths]
    table = torch.zeros(4, max(counts), dtype=torch.int64)
    for row, own in zip(table, (torch.randperm(sum(counts)) + 1).split(counts)):
        row[: len(own)] = own

    def batch(spans) -> ForwardBatch:
        positions = torch.cat([torch.arange(start, end) for start, end in spans])
        rows = torch.cat([torch.full((end - start,), row) for row, (start, end) in enumerate(spans)])
        news = [end - start for start, end in spans]
        return ForwardBatch(
            token_ids=(positions * 7 + rows * 13) % 90 + 3,
            positions=positions,
            query_start_loc=torch.tensor([0, *torch.tensor(news).cumsum(0)]),
            seq_lens=torch.tensor([end for _, end in spans]),
            block_table=table,
            slot_mapping=table[rows, positions // block_size] * block_size + positions % block_size,
            max_query_len=max(news),
            logits_indices=torch.arange(sum(news)),
            max_seq_len=max(end for _, end in spans),
        )

    def logits() -> torch.Tensor:
        cache = PagedKVCache(config.num_layers, config.num_kv_heads, config.head_dim, sum(counts), block_size, dtype)
        attention = NativeAttention(cache, config.layer_windows)
        model.forward(batch([(0, max(before, 1)) for before, _ in lengths]), attention)
        return model.forward(batch([(before, before + new) for before, new in lengths]), attention)

    whole = logits()
    for layer in model.layers:
        layer.whole = None
    torch.testing.assert_close(whole, logits(), rtol=1e-4, atol=1e-4 if dtype is torch.float32 else 0.5)


def test_native_attention_says_what_it_cannot_serve():
    with pytest.raises(ValueError, match=r"attention_backend='native'.*float16.*attention_backend='torch'"):
        NativeAttention(PagedKVCache(1, 1, 16, 2, 16, torch.float16), [None])


def test_the_kernels_can_be_switched_off(root):
    program = "import torch; from minillm.kernels import native; print(native.library(), native.serves(torch.ones(1)))"
    for value, said in (("0", "None False"), ("1", "True")):
        done = subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"MINILLM_NATIVE": value},
            capture_output=True, text=True, cwd=root, check=True,
        )  # fmt: skip
        assert done.stdout.strip().endswith(said)


def test_a_compiler_that_fails_leaves_the_twins(tmp_path, monkeypatch):
    compiler = tmp_path / "broken-compiler"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert native.library.__wrapped__(torch.float32) is None
    assert list((tmp_path / "cache").rglob("*.so")) == []  # no half-made file stays behind


def test_what_was_compiled_is_kept_and_used_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.library.__wrapped__(torch.float32) is not None
    [kept] = tmp_path.rglob("*.so")
    written = kept.stat().st_mtime_ns
    assert native.library.__wrapped__(torch.float32) is not None and kept.stat().st_mtime_ns == written


def test_a_folder_that_others_can_write_to_is_passed_over(tmp_path, monkeypatch):
    """Whatever lies there could be anybody's, and loading it runs it."""
    open_to_all, own = tmp_path / "cache" / "minillm", tmp_path / "tmp" / f"minillm-{os.getuid()}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for mode in (0o777, 0o770):
        open_to_all.mkdir(parents=True, exist_ok=True)
        open_to_all.chmod(mode)
        assert native.library.__wrapped__(torch.float32) is not None
        assert [path.parent for path in tmp_path.rglob("*.so")] == [own] and own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o722)
    assert native.library.__wrapped__(torch.float32) is None


def test_a_folder_of_somebody_else_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    somebody = os.getuid() + 1
    monkeypatch.setattr(native.os, "getuid", lambda: somebody)
    assert native.library.__wrapped__(torch.float32) is None and list(tmp_path.rglob("*.so")) == []
