"""The products of LoRA adapters against float64: the Triton kernels, and the C of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minillm.kernels import lora, native
from tests.helpers.kernel_cases import (
    ROUNDING,
    device,
    error,
    every_dtype,
    framed,
    guarded_outputs,
    needs_triton,
    poisoned,
    random,
)

# tokens, adapters, rank, in, out; rank 64 is the highest, and 1, 5, 10 and 20 are no multiples of a tile.
SHAPES = [(1, 1, 16, 96, 64), (7, 3, 1, 33, 50), (20, 8, 5, 40, 16), (33, 2, 64, 130, 100), (3, 4, 20, 1100, 7),
          (290, 3, 10, 24, 70)]  # fmt: skip
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler with OpenMP here: the twins serve")


class Case:
    """Random adapters and tokens, an output that is some columns of a wider matrix, and the exact result.

    `like`: "mixed" slots at random, -1 among them; "all" every slot in turn; "none" no adapter; "one" the last slot.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, like: str = "mixed", where: str = "cpu"):
        tokens, adapters, rank, k, n = shape
        generator = torch.Generator().manual_seed(sum(shape))
        self.a = random((adapters, rank, k), dtype).mul_(k**-0.5)
        self.b = random((adapters, rank, n), dtype, 1).transpose(1, 2)
        self.x = poisoned((tokens, k + 9), dtype)[:, 4 : 4 + k].copy_(random((tokens, k), dtype, 2))
        self.wide = framed((tokens, n + 24), dtype)
        self.output = self.wide[:, 8 : 8 + n].copy_(random((tokens, n), dtype, 3))
        self.slots = {
            "mixed": torch.randint(-1, adapters, (tokens,), generator=generator),
            "all": torch.arange(tokens) % adapters,
            "none": torch.full((tokens,), -1),
            "one": torch.full((tokens,), adapters - 1),
        }[like].to(torch.int32).to(device())  # fmt: skip
        self.n, self.before = n, self.output.clone()
        for name in ("a", "b", "x", "wide", "output", "slots", "before"):
            if where == "cpu":
                setattr(self, name, getattr(self, name).cpu())

    def exact(self) -> Tensor:
        """Float64 [tokens, out]."""
        result = self.before.double()
        for token, slot in enumerate(self.slots.tolist()):
            if slot >= 0:
                reduced = self.a[slot].double() @ self.x[token].double()
                result[token] += self.b[slot].double() @ reduced
        return result

    def check(self, roundings: float) -> None:
        """The output is right to a few roundings, tokens without an adapter are as they were, and so is what lies
        around."""
        exact = self.exact()
        assert error(self.output, exact) <= roundings * ROUNDING[self.output.dtype]
        without = self.slots < 0
        assert torch.equal(self.output[without], self.before[without])
        assert self.wide[:, :8].isnan().all() and self.wide[:, 8 + self.n :].isnan().all()


@needs_triton
@every_dtype
@every_shape
def test_the_kernels_add_the_product_of_every_tokens_adapter(shape, dtype):
    for like in ("mixed", "all", "none", "one") if shape == SHAPES[2] else ("mixed",):
        case = Case(shape, dtype, like, device())
        with guarded_outputs():
            assert lora.triton_add_lora_(case.output, case.x, case.a, case.b, case.slots) is case.output
        case.check(2)


@needs_triton
def test_the_kernels_take_b_in_any_layout_and_a_plan():
    case = Case(SHAPES[2], torch.float32, where=device())
    plan = lora.plan_lora(case.slots, 8)
    lora.triton_add_lora_(case.output, case.x, case.a, case.b.contiguous(), case.slots, plan)
    case.check(2)
    empty = case.output[:0]
    assert lora.triton_add_lora_(empty, case.x[:0], case.a, case.b, case.slots[:0]) is empty


def test_a_plan_sorts_the_tokens_by_slot():
    plan = lora.plan_lora(torch.tensor([2, 2, -1, 0, 0, 0], dtype=torch.int32), 4)
    assert plan.order.tolist() == [2, 3, 4, 5, 0, 1] and plan.starts.tolist() == [1, 4, 4, 6, 6]
    assert plan.starts.dtype == torch.int32


@needs_triton
def test_the_places_of_a_plan_hold_every_token_once():
    """`find_tile` on the host: however the tokens are shared out, each lies in one tile, in the tile of its slot."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        tokens, adapters = (int(torch.randint(1, most, (), generator=generator)) for most in (70, 9))
        slots = torch.randint(-1, adapters, (tokens,), generator=generator, dtype=torch.int32)
        order, starts = lora.plan_lora(slots, adapters)
        seen, first_place = [], (starts[:-1] - starts[0]) // 16 + torch.arange(adapters)
        for place in range(tokens // 16 + adapters):
            slot = int((first_place <= place).sum()) - 1
            first = int(starts[slot]) + (place - int(first_place[slot])) * 16
            tile = order[first : min(first + 16, int(starts[slot + 1]))] if first < int(starts[slot + 1]) else order[:0]
            assert (slots[tile] == slot).all()
            seen += tile.tolist()
        assert sorted(seen) == (slots >= 0).nonzero()[:, 0].tolist()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_shape
def test_on_a_cpu_the_same_is_c(shape, dtype, monkeypatch):
    monkeypatch.setattr(lora, "torch_add_lora_", lambda *given: pytest.fail("the twin served"))
    for like in ("mixed", "all", "none", "one"):
        for contiguous in (False, True):
            case = Case(shape, dtype, like)
            b = case.b.contiguous() if contiguous else case.b
            assert lora.add_lora_(case.output, case.x, case.a, b, case.slots) is case.output
            case.check(2)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_shape
def test_on_a_cpu_a_token_has_the_same_bits_in_any_company(shape, dtype):
    """Alone, among others, in another order, with more threads or fewer."""
    case = Case(shape, dtype)
    lora.add_lora_(case.output, case.x, case.a, case.b, case.slots)
    for token in range(0, len(case.x), 1 + len(case.x) // 9):
        for company in ([token], [token, token], [0, token, len(case.x) - 1, token, token, token, token]):
            output = case.before[company]
            lora.add_lora_(output, case.x[company], case.a, case.b, case.slots[company])
            assert torch.equal(output[-1], case.output[company[-1]])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        again = case.before.clone()
        lora.add_lora_(again, case.x, case.a, case.b, case.slots)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(again, case.output)


@needs_compiler
def test_on_a_cpu_many_threads_share_few_tokens():
    """Ranks and outputs are parted then, here among five threads; odd sizes leave some with little or nothing."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        for tokens, like in ((1, "one"), (3, "all"), (19, "mixed")):
            case = Case((tokens, 3, 61, 1500, 1501), torch.float32, like)
            lora.add_lora_(case.output, case.x, case.a, case.b, case.slots)
            case.check(2)
    finally:
        torch.set_num_threads(threads)


def test_what_the_kernels_do_not_serve_goes_to_the_twin():
    """Adapters of another dtype than the hidden state, float16 on a CPU, and slots of another dtype."""
    for dtype, adapters in ((torch.float32, torch.float64), (torch.float16, torch.float16)):
        case = Case(SHAPES[1], torch.float32)
        output, x = case.output.to(dtype), case.x.to(dtype)
        lora.add_lora_(output, x, case.a.to(adapters), case.b.to(adapters), case.slots)
        torch.testing.assert_close(output.double(), case.exact(), rtol=5e-3, atol=5e-3)
    case = Case(SHAPES[1], torch.float32)
    lora.add_lora_(case.output, case.x, case.a, case.b, case.slots.long())
    case.check(2)
