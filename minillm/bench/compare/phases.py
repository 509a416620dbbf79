"""Where minillm's time goes in a case: a run of its own, with C kernels that keep time. Built in chapter 14.

A ratio to a peer says who is faster. Whether more can be had is a question to the phases: products that run at the
machine's rate, and take most of the time, leave little.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from ...kernels import native
from ...model.config import ModelConfig
from ..measure import Ceilings, name_of
from .request import Answer, Peer, Request
from .workloads import Case

PHASES = ("matrix products", "attention", "sampling")  # as native_base.h numbers them
REST = "the rest"


@contextmanager
def kernels_that_keep_time(dtype: torch.dtype) -> Iterator[Callable[[], dict[str, float]]]:
    """While it lasts, every engine's C kernels for `dtype` add up the seconds of each phase, of the first thread; what
    it yields takes them and begins anew. They are compiled at the first time, about 4 s. Many tokens pass through a
    layer in chunks; what lies between the products of a chunk counts as products."""
    with mock.patch.object(native, "FLAGS", (*native.FLAGS, "-DTIMED")):
        native.library.cache_clear()
        try:
            kernels = {kept._name: kept for kept in map(native.library, (dtype, torch.float32))}.values()

            def taken() -> dict[str, float]:
                spent = dict.fromkeys(PHASES, 0.0)
                for one in kernels:
                    nanoseconds = (ctypes.c_long * len(PHASES))()
                    one.take_spent(nanoseconds)
                    for phase, count in zip(PHASES, nanoseconds):
                        spent[phase] += count / 1e9
                return spent

            taken()
            yield taken
        finally:
            native.library.cache_clear()


def phases_of(
    engine: Peer, case: Case, dtype: torch.dtype, config: ModelConfig, ceilings: Ceilings, weight_bytes: int | None
) -> dict | None:
    """Seconds of each phase while `engine` answers, prompts included, and how fast its products are: operations a
    second, and when all sequences decode together, the bytes of weights that are read; each with its share of what the
    machine can do. None where there are no C kernels."""
    if native.library(dtype) is None:
        return None
    with kernels_that_keep_time(dtype) as taken:
        engine.answer(case.request)  # these kernels have memory of their own, which the first run touches
        taken()
        answer: Answer = engine.answer(case.request)
        spent = taken()
    products = spent[PHASES[0]]
    spent[REST] = answer.seconds - sum(spent.values())
    flops = operations(case.request, config) / products
    told = {
        "seconds": spent,
        "product_flops_per_second": flops,
        "product_share_of_flops": flops / ceilings.matmul_flops_per_second[name_of(dtype)],
    }
    if case.group == "decode":  # every step reads all weights once, that of the prompts too
        steps = case.request.lengths[0]
        rate = steps * (weight_bytes or config.num_parameters() * dtype.itemsize) / products
        told |= {"weight_bytes_per_second": rate, "weight_share_of_bandwidth": rate / ceilings.bandwidth}
    return told


def operations(request: Request, config: ModelConfig) -> int:
    """Of the matrix products, two a weight and row: all weights but the output matrix for every token that is read,
    the output matrix for every token that is generated."""
    head = config.vocab_size * config.hidden_size
    body = config.num_parameters() - head * (1 if config.tie_word_embeddings else 2)
    read = request.prompt_tokens + request.output_tokens - len(request.prompts)  # the last ones are not read
    return 2 * (body * read + head * request.output_tokens)
