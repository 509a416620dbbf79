"""The pictures of chapters 00 to 02: what they tell, in words."""

from __future__ import annotations

import torch

from minillm.book import model_figures, sampling_figures, start_figures


def test_the_loop_of_an_engine_names_its_parts_in_their_order():
    alt = start_figures.engine_loop().alt
    places = [alt.index(part) for part in ("Requests", "scheduler", "the model", "weights", "sampler", "streamed")]
    assert places == sorted(places)


def test_one_turn_ends_with_a_token_that_is_appended():
    alt = sampling_figures.one_turn().alt
    assert "logits" in alt and alt.index("softmax") < alt.index("chosen") < alt.index("appended")


def test_the_pictures_of_sampling_carry_their_numbers():
    alt = sampling_figures.bars_and_text(0.8, ["a", "b"], torch.tensor([0.7, 0.3]), "a b a").alt
    assert "temperature 0.8" in alt and "a b a" in alt
    assert "top_p=0.9 keeps 1 and 32" in sampling_figures.kept_tokens({"top_p=0.9": [1, 32]}, ["sure", "unsure"]).alt
    grid = {(T, p): {"repetition": T, "perplexity": T + p} for T in (0.5, 1.0) for p in (0.8, 1.0)}
    real = {"repetition": 0.1, "perplexity": 1.7}
    assert "perplexity of held-out stories 1.70" in sampling_figures.against_temperature(grid, real).alt


def test_every_temperature_and_top_p_is_drawn(monkeypatch):
    drawn = []

    def watched(**size):
        fig, axes = canvas(**size)
        drawn.append(axes)
        return fig, axes

    canvas = sampling_figures.canvas
    monkeypatch.setattr(sampling_figures, "canvas", watched)
    grid = {(T, p): {"a": T * p, "b": T} for T in (0.5, 1.0, 2.0) for p in (0.8, 1.0)}
    sampling_figures.against_temperature(grid, {"a": 1.0, "b": 1.0})
    lines = [line.get_ydata().tolist() for line in drawn[0][0].lines if len(line.get_ydata()) == 3]
    assert lines == [[0.4, 0.8, 1.6], [0.5, 1.0, 2.0]]


def test_the_stream_is_read_by_attention_and_then_by_the_mlp():
    alt = model_figures.residual_stream(layers=7).alt
    assert "in each of 7 layers attention" in alt and alt.index("attention") < alt.index("the MLP")


def test_hands_turn_and_their_angle_stays():
    query, key = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    frequencies = 10000.0 ** (-torch.arange(4) / 4)
    moved = {"only the query moves": [0.1 * i for i in range(9)], "both move": [1.0] * 9}
    alt = model_figures.dials(query, key, frequencies, 3, 5, moved, pairs=(0, 1)).alt
    assert "5 tokens apart, slid by 3 tokens" in alt and "2 pairs" in alt


def test_heads_shares_and_bytes_carry_their_numbers():
    weights = torch.full((4, 3, 3), 1 / 3).tril()
    assert "4 query heads of layer 2" in model_figures.heads(2, weights, group=2).alt
    parts, work = {"m": {"embedding": 10, "MLP": 30}}, {"m": {"logits": 10, "attention scores": 30}}
    assert "context of 1,024 tokens" in model_figures.shares(parts, work, 1024).alt
    alt = model_figures.kv_range({"m": ("MQA", 2048, 8192, 2048), "n": ("MLA", 1024, 65536, 4096)}).alt
    assert "m 2 KiB (MQA)" in alt and "n 4 KiB (MLA)" in alt
    assert "latent of 512" in model_figures.latent().alt
    assert "full rate" in model_figures.last_row({"theirs": 0.2, "ours": 0.1}, 0.05, 3e9).alt
