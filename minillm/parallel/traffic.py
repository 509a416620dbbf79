"""What a step sends, as a formula: messages and bytes of one rank. Built in chapter 20.

    tensor parallel     an all-reduce of [tokens, hidden_size] behind the embedding, and two in every layer; then what
                        the draw needs of the other ranks (`minillm.parallel.sampler`)
    pipeline parallel   [tokens, hidden_size] from each stage to the next, and the drawn tokens back

`Communicator` counts the same while a step runs (`llm.engine.executor.collective("take_traffic")` has the counters of
all ranks), and tests hold the two against each other. A step that is replayed as a CUDA graph sends the same, and
counts nothing.
"""

from __future__ import annotations

from minillm.model.config import ModelConfig
from minillm.parallel.communicator import Traffic
from minillm.parallel.layout import Layout

DRAWS = ("greedy", "temperature", "min_p", "top_k", "gathered")
FLOAT, TOKEN = 4, 8  # bytes of a logit, and of a token id


def step_traffic(
    config: ModelConfig,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    num_tokens: int,
    num_rows: int,
    *,
    rank: int = 0,
    itemsize: int = 4,
    draw: str = "greedy",
    top_k: int = 0,
) -> Traffic:
    """The messages of `rank` in a step of `num_tokens` tokens, `num_rows` of which are drawn from.

    `itemsize`: bytes of an activation. `draw` is what the rows ask for, the most expensive of them: "greedy" and
    "temperature" cost the same; "top_k" needs `top_k`, the largest; "gathered" is everything that needs all logits.
    """
    if draw not in DRAWS:
        raise ValueError(f"draw={draw!r} is not allowed; allowed: {', '.join(DRAWS)}")
    layout = Layout(tensor_parallel_size, pipeline_parallel_size, rank)
    traffic, hidden = Traffic(), num_tokens * config.hidden_size * itemsize
    if tensor_parallel_size > 1:
        num_layers = len(layout.layers(config.num_layers))
        traffic.add("all_reduce", hidden, 2 * num_layers + layout.is_first)
        if config.qk_norm_whole:
            traffic.add("all_reduce", num_tokens * FLOAT, 2 * num_layers)
        if num_rows and layout.is_last:
            _add_draw(traffic, config, tensor_parallel_size, num_rows, draw, top_k)
    if not layout.is_last:
        traffic.add("send", hidden)
    if not layout.is_first:
        traffic.add("receive", hidden)
    if pipeline_parallel_size > 1 and num_rows:
        traffic.add("broadcast", num_rows * TOKEN)
    return traffic


def _add_draw(traffic: Traffic, config: ModelConfig, ranks: int, num_rows: int, draw: str, top_k: int) -> None:
    each = -(-config.vocab_size // ranks)
    if draw == "gathered":
        traffic.add("gather", num_rows * each * FLOAT)
        traffic.add("broadcast", num_rows * TOKEN)
        return
    if draw == "min_p":
        traffic.add("all_reduce", num_rows * FLOAT)
    if draw == "top_k":
        traffic.add("all_gather", num_rows * min(top_k, each) * FLOAT)
    traffic.add("all_gather", num_rows * 2 * FLOAT)
