"""The drawings of the primers say what is true of what they draw."""

from __future__ import annotations

import random

import pytest
import torch

from minillm.book import primers


@pytest.mark.parametrize("seed", range(20))
def test_addresses_are_where_the_elements_lie(seed):
    rng = random.Random(seed)
    memory = torch.arange(rng.randint(20, 60))  # every element holds its own address
    rows, cols = rng.randint(1, 4), rng.randint(1, 4)
    view = memory.as_strided((rows, cols), (rng.randint(0, 4), rng.randint(0, 3)), rng.randint(0, 5))
    assert primers.addresses(view) == view.tolist()


def test_the_picture_of_views_names_every_address():
    x = torch.arange(6).view(2, 3)
    alt = primers.memory_and_views(x, {"x.T": x.T, "x[:, :1]": x[:, :1]}, chunk=3).alt
    assert "x.T shows addresses [[0, 3], [1, 4], [2, 5]]" in alt and "x[:, :1] shows addresses [[0], [3]]" in alt


def test_the_formats_are_drawn_at_their_own_step(monkeypatch):
    drawn = []
    canvas = primers.canvas

    def watched(**size):
        fig, axes = canvas(**size)
        drawn.extend(axes)
        return fig, axes

    monkeypatch.setattr(primers, "canvas", watched)
    assert "float16" in primers.float_formats([torch.bfloat16, torch.float16], near=256, width=8).alt
    marks = [[segment[0][0] for segment in lines.get_segments()] for lines in drawn[2].collections]
    assert marks[0] == [256, 258, 260, 262, 264]
    assert marks[1] == [256 + i / 4 for i in range(33)]


def test_the_flame_chart_puts_what_is_called_under_its_caller(monkeypatch):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
    from torch.profiler import ProfilerActivity, profile, record_function

    weight = torch.randn(64, 64)
    with profile(activities=[ProfilerActivity.CPU]) as prof, record_function("step"):
        weight.T.contiguous()
    depths = {event.name: primers._depth(event) for event in prof.events()}
    assert (
        depths["step"] == 0
        and depths["aten::contiguous"] == 1
        and depths["aten::clone"] == 2
        and depths["aten::copy_"] == 3
    )
    assert (
        primers.flame_chart(prof.events(), roles={"copy_": "wasted"}, alt="a copy inside a step").alt
        == "a copy inside a step"
    )
