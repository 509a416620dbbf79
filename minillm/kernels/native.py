"""The CPU's own kernels: native.c compiled for this machine, loaded, and called on tensors. Built in chapter 14.

PyTorch runs a decode step as hundreds of small operations, each of which passes over the data once and costs
microseconds before it begins. Here each chain of them is one loop. Every function has a PyTorch twin, which serves
where there is no C compiler (and on a GPU), and which the tests compare it with:

    linear          minillm.model.layers.Linear (through oneDNN)
    rms_norm        minillm.model.layers.RMSNorm       rotary_angles   minillm.model.layers.Rotary
    gate_mul        minillm.model.layers.SwiGLU        rotate          minillm.model.layers.apply_rotary
    gumbel_noise    minillm.sampling.noise             paged_attention minillm.kv_cache.torch_attention
    add_lora_       minillm.kernels.lora               latent_attention minillm.kv_cache.latent
    run_experts     minillm.kernels.grouped_matmul, called by minillm.kernels.native_experts
    draw            minillm.sampling.sampler.Sampler, called by minillm.kernels.native_sampling

`MINILLM_NATIVE=0` in the environment switches all of them off.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from minillm.kernels import huge_pages
from minillm.kernels.native_build import cache_folder, compile_shared, cpu_name, first_error, is_ours, unit_flags
from minillm.kernels.native_structs import (
    KV_FLAGS,
    LANES,
    Adapters,
    DecoderWeights,
    Experts,
    Latents,
    Layer,
    Matrix,
    Pages,
    Sequences,
    padded_inputs,
)
from minillm.kernels.native_threads import release_team_at_fork
from minillm.rounding import ceil_div

SOURCE = Path(__file__).with_name("native.c")
FLAGS = (
    "-O3", "-march=native", "-std=gnu11", "-fopenmp", "-shared", "-fPIC",
    "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
)  # fmt: skip
DTYPES = {torch.float32: (), torch.bfloat16: ("-DBF16",)}


@cache
def library(dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None) -> ctypes.CDLL | None:
    """The kernels for `dtype`, and for KV pages of `kv_dtype` where those hold codes, compiled at the first call on
    this machine (about 4 s) and kept; None where there are none. Warns with the compiler's first error if it refuses
    them."""
    release_team_at_fork()  # torch's loops, too, would hang in a forked child
    if os.environ.get("MINILLM_NATIVE") == "0" or dtype not in DTYPES or not sys.platform.startswith("linux"):
        return None
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang")
    if compiler is None:
        return None
    flags = (*FLAGS, *unit_flags(), *DTYPES[dtype], *KV_FLAGS.get(kv_dtype, ()))
    sources = b"".join(path.read_bytes() for path in (SOURCE, *sorted(SOURCE.parent.glob("native_*.h"))))
    key = hashlib.sha256(sources + repr((compiler, flags, cpu_name())).encode()).hexdigest()[:16]
    refused = None
    for folder in (cache_folder(), Path(tempfile.gettempdir()) / f"minillm-{os.getuid()}"):
        path = folder / f"native-{key}.so"
        try:
            if not is_ours(folder):
                continue
            if not path.exists():
                compile_shared(compiler, flags, SOURCE, path)
            return _declare(ctypes.CDLL(str(path)))
        except OSError:
            continue  # a folder that we cannot write to, or a compiler that left us a broken file
        except subprocess.CalledProcessError as error:  # perhaps it has no OpenMP
            refused = error
    if refused is not None:
        warnings.warn(
            f"{compiler} does not compile minillm's kernels: {first_error(refused)}; PyTorch's slower operations serve "
            "instead. Set CC to another compiler, or MINILLM_NATIVE=0 to do without them",
            RuntimeWarning,
            stacklevel=2,
        )
    return None


def serves(x: Tensor) -> bool:
    """Whether there are kernels for this tensor."""
    return x.is_cpu and library(x.dtype) is not None


def pack(weight: Tensor) -> Tensor:
    """A weight [out_features, in_features] in the order in which `linear` reads it, flat: groups of panels of 16
    outputs, [in_features / pair, panels, 16, pair] each, missing outputs and inputs zero. A pair is 2 where bfloat16 is
    multiplied in pairs, else 1; a group has 3 panels with AVX-512, else 1, and the last one those that are left."""
    out_features, in_features = weight.shape
    kernels = library(weight.dtype)
    pair, group = kernels.weight_pair(), kernels.weight_panels()
    padded = torch.nn.functional.pad(weight, (0, -in_features % pair, 0, -out_features % LANES))
    panels = padded.view(-1, LANES, padded.shape[1] // pair, pair).transpose(1, 2)  # [panels, pairs, 16, pair]
    return huge_pages.copy(in_groups(panels, group))


def in_groups(panels: Tensor, group: int) -> Tensor:
    """Panels [panels, steps, ...] as a product reads them, flat: of `group` panels together step by step."""
    whole = len(panels) // group * group
    groups = panels[:whole].unflatten(0, (-1, group)).transpose(1, 2)
    return torch.cat([groups.flatten(), panels[whole:].transpose(0, 1).flatten()])


def unpack(packed: Tensor, out_features: int, in_features: int) -> Tensor:
    """The weight that `pack` packed."""
    pair, group = library(packed.dtype).weight_pair(), library(packed.dtype).weight_panels()
    num_panels, pairs = ceil_div(out_features, LANES), ceil_div(in_features, pair)
    whole = num_panels // group * group
    main, rest = packed.split([whole * pairs * LANES * pair, (num_panels - whole) * pairs * LANES * pair])
    panels = [rest.view(pairs, -1, LANES, pair).transpose(0, 1)] if len(rest) else []
    if whole:
        panels.insert(0, main.view(-1, pairs, group, LANES, pair).transpose(1, 2).flatten(0, 1))
    return torch.cat(panels).transpose(1, 2).reshape(num_panels * LANES, pairs * pair)[:out_features, :in_features]


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """x [num_tokens, in_features] times a packed weight: [num_tokens, out_features]."""
    in_features = padded_inputs(packed, out_features)
    if x.shape[1] != in_features:
        x = torch.nn.functional.pad(x, (0, in_features - x.shape[1]))
    x = x.contiguous()
    out = torch.empty(x.shape[0], out_features, dtype=x.dtype)
    bias_place = None if bias is None else bias.data_ptr()
    library(x.dtype).linear(
        x.data_ptr(), packed.data_ptr(), bias_place, out.data_ptr(), x.shape[0], out_features, in_features
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size], its rows evenly spaced along at most two dimensions."""
    size = x.shape[-1]
    inner, stride = (1, x.stride(0)) if x.dim() == 2 else (x.shape[-2], x.stride(0))
    if x.stride(-1) != 1 or x.dim() > 3 or (x.dim() == 3 and x.stride(1) != size) or x.dim() < 2:
        x = x.contiguous()
        inner, stride = 1, size
    out = torch.empty(x.shape, dtype=x.dtype)
    library(x.dtype).rms_norm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, inner, stride, inner * size, eps
    )
    return out


GATED = {"silu": "silu_mul", "gelu_pytorch_tanh": "gelu_mul"}  # PyTorch's have other bits where its threads part a row


def gate_mul(x: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, [num_tokens, size], of a contiguous x [num_tokens, 2 * size], gate beside up."""
    num_tokens, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=x.dtype)
    getattr(library(x.dtype), GATED[activation])(x.data_ptr(), out.data_ptr(), num_tokens, size)
    return out


def silu_mul(x: Tensor) -> Tensor:
    return gate_mul(x, "silu")


def rotary_angles(
    positions: Tensor, frequencies: Tensor, sin_scale: Tensor, cos_scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and signed sin, each [num_tokens, 1, head_dim]; see `minillm.model.layers.Rotary`."""
    num_tokens, dim = positions.shape[0], frequencies.shape[0]
    cos, sin = torch.empty(2, num_tokens, 1, dim, dtype=dtype).unbind()
    library(dtype).rotary_angles(
        positions.data_ptr(),
        frequencies.data_ptr(),
        sin_scale.data_ptr(),
        cos_scale,
        cos.data_ptr(),
        sin.data_ptr(),
        num_tokens,
        dim,
    )
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [num_tokens, heads, head_dim], whose heads lie side by side; a new tensor."""
    num_tokens, heads, dim = x.shape
    out = torch.empty(num_tokens, heads, dim, dtype=x.dtype)
    library(x.dtype).rotate(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), num_tokens, heads, dim, x.stride(0)
    )
    return out


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """float32 [num_rows, num_tokens]; token_ids [num_tokens], all int64 and contiguous."""
    rows, count = seeds.shape[0], token_ids.shape[0]
    out = torch.empty(rows, count)
    library().gumbel_noise(seeds.data_ptr(), positions.data_ptr(), token_ids.data_ptr(), out.data_ptr(), rows, count)
    return out


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, pages: Pages, sequences: Sequences, turn: Tensor | None = None
) -> Tensor:
    """Write k and v into their slots, then attend over the pages: [num_tokens, num_heads, head_dim].

    q, k and v with heads side by side.
    `turn`, [2, num_tokens, head_dim] float32, is what a query is turned by before it meets the sinks:
    cos and signed sin. Raises MemoryError where the scores of a query do not fit into memory.
    """
    num_tokens, heads, dim = q.shape
    out = torch.empty(num_tokens, heads, dim, dtype=q.dtype)
    failed = library(q.dtype, pages.dtype).paged_attention(
        pages, sequences, q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), k.stride(0), v.stride(0),
        None if turn is None else turn.data_ptr(), out.data_ptr(), num_tokens, heads, dim**-0.5,
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory for the scores of {sequences.max_seq_len} positions; lower max_model_len")
    return out


def heads_side_by_side(x: Tensor) -> Tensor:
    """x [num_tokens, heads, head_dim] as `paged_attention` reads it: any distance from token to token, none within."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def latent_attention(q: Tensor, k: Tensor, latents: Latents, sequences: Sequences, num_decodes: int) -> Tensor:
    """Write the latents k [num_tokens, 1, latent_dim] of all tokens into their slots, then attend for the first
    `num_decodes` tokens, each the last of its sequence: [num_tokens, num_heads, value_dim], of which the other rows are
    not written.

    q [num_tokens, num_heads, latent_dim] in one piece. A token's result has the same bits whatever shares its batch.
    Raises MemoryError where the sums of all sequences do not fit into memory.
    """
    num_tokens, heads, dim = q.shape
    out = torch.empty(num_tokens, heads, latents.value_dim, dtype=q.dtype)
    failed = library(q.dtype).latent_attention(
        latents, sequences, q.data_ptr(), k.data_ptr(), k.stride(0), out.data_ptr(), num_tokens, num_decodes, heads,
        dim**-0.5,
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory for the sums of {sequences.max_seq_len} positions; lower max_model_len")
    return out


def decoder_layer(
    layer: Layer,
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: Pages,
    sequences: Sequences,
    turn: Tensor | None = None,
) -> None:
    """All of a decoder layer, in place on hidden [num_tokens, hidden_size]."""
    failed = library(hidden.dtype, pages.dtype).decoder_layer(
        layer, hidden.data_ptr(), cos.data_ptr(), sin.data_ptr(), pages, sequences,
        None if turn is None else turn.data_ptr(), hidden.shape[0],
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory for a layer of {hidden.shape[0]} tokens and {sequences.max_seq_len} positions")


def add_lora_(output: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, token_slots: Tensor) -> None:
    """Add to output [num_tokens, out_features], in place, what each token's adapter makes of x: see
    `minillm.kernels.lora`.

    All of one dtype. B is read fastest where the outputs of a rank lie side by side, as in a transposed view. A token's
    result has the same bits whatever shares its batch.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    slots = token_slots if token_slots.is_contiguous() else token_slots.contiguous()
    failed = library(output.dtype).add_lora(
        Adapters.of(lora_a, lora_b), x.data_ptr(), x.stride(0), slots.data_ptr(),
        output.data_ptr(), output.stride(0), x.shape[0],
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory for the adapters' products of {x.shape[0]} tokens")


def _declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes what each function takes, so that plain numbers can be passed: an object a number takes longer."""
    p, n, f = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
    loaded.linear.argtypes = (p, p, p, p, n, n, n)
    loaded.multiply.argtypes = (ctypes.POINTER(Matrix), p, p, p, p, n)
    loaded.unpack_rows.argtypes = (ctypes.POINTER(Matrix), p, p, n)
    loaded.rms_norm.argtypes = (p, p, p, n, n, n, n, n, f)
    loaded.silu_mul.argtypes = loaded.gelu_mul.argtypes = (p, p, n, n)
    loaded.rotary_angles.argtypes = (p, p, p, f, p, p, n, n)
    loaded.rotate.argtypes = (p, p, p, p, n, n, n, n)
    loaded.gumbel_noise.argtypes = (p, p, p, p, n, n)
    loaded.draw.argtypes = (p, n, p, p, p, p, p, n, n)
    loaded.add_lora.argtypes = (ctypes.POINTER(Adapters), p, n, p, p, n, n)
    loaded.run_experts.argtypes = (ctypes.POINTER(Experts), p, p, p, p, n, n)
    loaded.route.argtypes = (p, p, p, p, n, n, n, n, n, f)
    loaded.combine_rows.argtypes = (p, p, p, p, n, n, n)
    where = (ctypes.POINTER(Pages), ctypes.POINTER(Sequences))
    loaded.paged_attention.argtypes = (*where, p, p, p, n, n, n, p, p, n, n, f)
    if hasattr(loaded, "latent_attention"):  # not for pages of codes
        latents = (ctypes.POINTER(Latents), ctypes.POINTER(Sequences))
        loaded.latent_attention.argtypes = (*latents, p, p, n, p, n, n, n, f)
    loaded.chunks_from.restype = n
    loaded.decoder_layer.argtypes = (ctypes.POINTER(Layer), p, p, p, *where, p, n)
    loaded.decoder.argtypes = (ctypes.POINTER(DecoderWeights), p, p, p, where[1], p, p, n, p, n)
    return loaded
