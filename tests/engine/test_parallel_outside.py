"""Faults of a parallel LLM that random models and settings found, each with the smallest case that shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from minillm import LLM, SamplingParams
from tests.helpers.tiny import save_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def said(folder: Path, tensor_parallel_size: int, pipeline_parallel_size: int, **settings) -> list[list[int]]:
    sizes = dict(tensor_parallel_size=tensor_parallel_size, pipeline_parallel_size=pipeline_parallel_size)
    settings |= dict(device="cpu", dtype="float32", num_kv_blocks=20, max_model_len=64)
    with LLM(folder, **settings, **sizes) as llm:
        outputs = llm.generate([[5, 6, 7], [8] * 20, [9, 5], [7]], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("split", [(1, 2), (1, 3), (2, 2)], ids=str)
def test_an_output_matrix_in_few_bits_that_is_the_embedding_too(tmp_path, split):
    """The first stage of a pipeline embeds with it, and the last one makes logits with it."""
    save_tiny_llama(tmp_path, num_hidden_layers=3, tie_word_embeddings=True)
    few_bits = {"weights": "int4", "group_size": 8}
    assert said(tmp_path, *split, quantization=few_bits) == said(tmp_path, 1, 1, quantization=few_bits)


def test_the_biases_of_streamed_layers_are_added_once(tmp_path):
    """Streamed matrices are not prepared, and it was there that all ranks but the first let their bias go."""
    save_tiny_llama(tmp_path, num_hidden_layers=3, attention_bias=True, mlp_bias=True)
    assert said(tmp_path, 2, 1, cpu_offload_bytes=10**6) == said(tmp_path, 1, 1, cpu_offload_bytes=10**6)


def test_three_stages_with_a_step_in_each(tmp_path):
    """A stage reads the tokens of every step before, not of the last one alone."""
    save_tiny_llama(tmp_path, num_hidden_layers=3)
    assert said(tmp_path, 1, 3) == said(tmp_path, 1, 1)
