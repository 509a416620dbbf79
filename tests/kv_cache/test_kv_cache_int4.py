"""Keys and values in 4 bits: two codes a byte, the error that follows from the arithmetic, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from minillm import LLM, SamplingParams
from minillm.kernels import native
from minillm.kv_cache.native_attention import NativeAttention
from minillm.kv_cache.paged import PagedKVCache
from minillm.kv_cache.quantized import INT4, dequantize_vectors, pack_nibbles, quantize_vectors, unpack_nibbles
from minillm.kv_cache.torch_attention import TorchAttention
from minillm.kv_cache.triton_attention import TritonAttention
from tests.helpers.kernel_cases import device, needs_triton
from tests.helpers.tiny import save_tiny_llama, seeded
from tests.kv_cache.test_kv_cache_quantized import batch_of, formula


def test_a_byte_holds_an_even_dimension_low_and_the_next_one_high():
    codes = torch.tensor([[1, -1, 7, -7, 0, -8]], dtype=torch.int8)
    packed = pack_nibbles(codes)
    assert packed.tolist() == [[0xF1, 0x97, 0x80]] and packed.dtype is torch.uint8
    assert torch.equal(unpack_nibbles(packed), codes)
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack_nibbles(unpack_nibbles(every)), every)
    assert unpack_nibbles(every).tolist()[:6] == [0, 0, 1, 0, 2, 0]


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_along_any_dimension(dim):
    codes = torch.randint(-7, 8, (4, 6, 8), dtype=torch.int8)
    packed = pack_nibbles(codes.movedim(dim, -1)).movedim(-1, dim)
    assert torch.equal(unpack_nibbles(packed, dim), codes)


@seeded
@given(st.integers(1, 40), st.sampled_from([2, 16, 34, 64]), st.sampled_from([1.0, 30.0]), st.integers(0, 1000))
def test_a_number_is_off_by_a_fourteenth_and_attention_by_what_follows(length, head_dim, loud, seed):
    """A score by |q| . max|k| / 14 / sqrt(d), a weight by the exponential of twice that, a mean of values by theirs."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, 2, head_dim, generator=generator) for n in (1, length, length))
    k[..., 0] *= loud  # an outlier stretches the grid of its vector, and the bound with it
    (kc, ks), (vc, vs) = quantize_vectors(k, INT4), quantize_vectors(v, INT4)
    near = [dequantize_vectors(codes, scales[..., None], torch.float32) for codes, scales in ((kc, ks), (vc, vs))]
    step_k, step_v = k.abs().amax(-1) / 14, v.abs().amax(-1) / 14  # [tokens, heads]
    assert ((near[0] - k).abs().amax(-1) <= step_k * 1.0001).all()
    score = (q.abs().sum(-1) * step_k).amax(0) / math.sqrt(head_dim)  # [heads], of the worst key
    largest = v.abs().amax((0, 2))
    bound = torch.expm1(2 * score) * largest + step_v.amax(0)
    exact = formula(q, k.double(), v.double(), None)
    error = (formula(q, *(x.double() for x in near), None) - exact)[0].abs().amax(-1)
    assert (error <= bound * 1.0001 + 1e-6).all()


def test_an_odd_head_is_refused():
    with pytest.raises(ValueError, match=r"head_dim=5 is odd, and a byte of kv_dtype='int4' holds two numbers"):
        PagedKVCache(1, 1, 5, 4, 4, torch.float32, kv_dtype="int4")


def test_triton_is_refused_for_heads_of_half_bytes_and_auto_takes_another(tmp_path):
    """A head is rotated in two halves, of 9 dimensions here: a byte would hold one of each."""
    save_tiny_llama(tmp_path, head_dim=18)
    with pytest.raises(ValueError, match="'triton' has no kernels for kv_cache_dtype='int4' with head_dim=18"):
        LLM(str(tmp_path), device="cpu", kv_cache_dtype="int4", attention_backend="triton")
    backend = LLM(str(tmp_path), device="cpu", kv_cache_dtype="int4").engine.runner.attention
    assert not isinstance(backend, TritonAttention)


@needs_triton
def test_triton_generates_what_the_twin_does(tmp_path):
    """Through the fused store, recorded steps and chunks; nothing but 4-bit pages holds what was computed."""
    save_tiny_llama(tmp_path, head_dim=16)
    prompts = [{"prompt_token_ids": [5 + i * step % 90 for i in range(length)]} for step, length in ((7, 21), (11, 3))]
    params, found = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True), []
    for backend, kind in (("torch", "int4"), ("triton", "int4"), ("torch", "auto")):
        settings = dict(device=device(), dtype="float32", kv_cache_dtype=kind, attention_backend=backend)
        llm = LLM(str(tmp_path), **settings, max_num_batched_tokens=16, max_model_len=32)
        assert isinstance(llm.engine.runner.attention, TritonAttention) == (backend == "triton")
        answers = llm.generate(prompts, params, use_tqdm=False)
        found.append([answer.outputs[0].token_ids for answer in answers])
    assert found[0] == found[1] != found[2]


@pytest.mark.skipif(native.library() is None, reason="no C compiler with OpenMP here: the twins serve")
@pytest.mark.parametrize("head_dim, block_size", [(32, 16), (64, 16), (18, 3)])
def test_the_kernel_reads_every_pair_of_codes(head_dim, block_size):
    """Values of one key each, so that what is read is what was written: all 225 pairs, at every place of a vector."""
    pairs = torch.cartesian_prod(torch.arange(-7, 8), torch.arange(-7, 8)).float()  # [225, 2]
    v = pairs.flatten().repeat(head_dim)[: 225 * head_dim].view(225, 1, head_dim)
    v[:, 0, 0] = 7.0  # so that every scale is 1
    caches = [PagedKVCache(1, 1, head_dim, 230, block_size, torch.float32, kv_dtype="int4") for _ in range(2)]
    slots, table = (torch.arange(225) + 1) * block_size, torch.arange(1, 226)[:, None]
    batch = batch_of([1] * 225, [1] * 225, table, slots)
    for attention in (NativeAttention(caches[0], [None]), TorchAttention(caches[1], [None], 1)):
        assert torch.equal(attention.attend(torch.randn(225, 1, head_dim), v, v, 0, batch), v)
