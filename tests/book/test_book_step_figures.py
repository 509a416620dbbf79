"""The pictures of chapters 13 and 14, and the configurations that chapter 14 times: what they tell, in words."""

from __future__ import annotations

import pytest
import torch

from minillm.book import paged_figures, step_figures
from minillm.book.one_product import compiled
from minillm.book.rungs import Rung, Served, shape, without
from minillm.book.step_figures import Bar
from minillm.kernels import native


def test_the_drawing_of_chapter_14_names_its_three_ideas():
    alt = step_figures.three_ideas().alt
    assert "launch less" in alt and "launch once" in alt and "launch earlier" in alt


def test_the_drawing_of_chapter_13_names_table_programs_and_merge():
    alt = paged_figures.cut_and_merge().alt
    assert "5, 2, 9, 4, 7 and 11" in alt and "Two programs" in alt and "merge" in alt


def test_a_page_of_latents_is_keys_and_values():
    assert "512 latent and 64 rotary columns" in paged_figures.latent_page().alt


@pytest.mark.parametrize("programs, places, expected", [(8, 264, [8]), (300, 264, [264, 36]), (4, 2, [2, 2])])
def test_waves(programs, places, expected):
    assert paged_figures.waves(programs, places) == expected


def test_lights_count_programs_and_sms():
    alt = paged_figures.lights("H100", 1, 8, 32768, "chosen").alt
    assert "1 split: 8 programs, 8 of 132 SMs lit" in alt and "32 splits: 256 programs, 132 of 132 SMs lit" in alt
    assert "4 splits: 32 programs, 32 of 132 SMs lit" in paged_figures.lights("H100", 1, 8, 32768, "4").alt


def test_the_busy_share_is_the_device_time_over_the_time_from_step_to_step():
    bars = [Bar("device", "compute", step, 4.0 * step, 4.0 * step + 1) for step in range(6)]
    assert step_figures.starts_of(bars)[3] == 12.0 and step_figures.busy_share(1.0, bars) == 0.25
    assert "slow: device busy 25%" in step_figures.lanes({"slow": bars}, 1.0, 20.0).alt


def test_the_other_pictures_carry_their_numbers():
    layer = {"eager": [("torch", "mm"), ("torch", "mul")], "whole": [("C", "decoder_layer")]}
    assert "eager 2; whole 1" in step_figures.a_layer(layer).alt
    alt = step_figures.ladder({"low": 0.03, "high": 0.01}, {"low": 0.002, "high": 0.001}, 0.008, "A title").alt
    assert "takes 8.0 ms" in alt and "low: 30.0 ms; high: 10.0 ms" in alt
    alt = step_figures.weights_and_launches({"T4": 0.000354, "H100": 0.000034}, 0.00224, 113_000_000).alt
    assert "T4 0.354 ms" in alt and "2.24 ms of launch overhead" in alt


def test_a_rung_without_c_kernels_has_none_and_generates_the_same_tokens():
    tiny = shape(1, hidden=32, intermediate=32, heads=1, kv_heads=1, head_dim=32, vocab=64)
    with without("C kernels"):
        assert native.library() is None
    tokens = []
    for off in ((), ("C kernels", "packed weights")):
        served = Served(Rung("", off, dict(attention_backend="torch", async_scheduling=False)), tiny, batch=2)
        assert served.run(steps=3) > 0
        tokens.append([request.output_token_ids for request in served.requests])
    assert tokens[0] == tokens[1] and len(tokens[0]) == 2 and len(tokens[0][0]) == 4


@pytest.mark.skipif(native.library() is None, reason="no C compiler")
@pytest.mark.parametrize("flags", [("-DAHEAD=0",), ("-DPANELS=1",)])
@pytest.mark.parametrize("rows", [1, 9, 70])
def test_the_product_alone_is_the_product(flags, rows):
    kernels = compiled(*flags)
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(80, 40, generator=generator), torch.randn(rows, 40, generator=generator)
    packed = native.in_groups(weight.view(-1, 16, 40, 1).transpose(1, 2), kernels.weight_panels()).contiguous()
    out = torch.full((rows, 80), float("nan"))
    kernels.linear(x.data_ptr(), packed.data_ptr(), None, out.data_ptr(), rows, 80, 40)
    assert torch.allclose(out, x @ weight.T, atol=1e-4)
