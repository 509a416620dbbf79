"""A layer of experts over processes: each rank's result is that of one process, whatever tokens it has."""

from __future__ import annotations

import pytest
import torch

from minillm import zoo
from minillm.model.checkpoint import load_model
from minillm.parallel.expert_processes import experts_in_processes
from minillm.parallel.placement import Placement
from minillm.parallel.processes import RankFailed


def test_ranks_compute_what_one_process_computes_with_copies_and_without_tokens():
    path = zoo.bundled()["tinyworld-moe"]
    torch.manual_seed(0)
    parts = [torch.randn(0, 256), torch.randn(11, 256)]
    placement = Placement(((0, 1, 2, 3, 7), (3, 4, 5, 6, 7)))
    answers = experts_in_processes(path, 2, parts, placement)
    mlp = load_model(path, "float32", "cpu").layers[2].mlp
    with torch.inference_mode():
        for part, (out, _) in zip(parts, answers):
            assert torch.equal(out, mlp(part))
    assert answers[0][1].rows == 0 and 0 < answers[1][1].rows <= 22


def test_a_layer_without_experts_is_named():
    with pytest.raises(RankFailed, match="layer=0 has no experts"):
        experts_in_processes(zoo.bundled()["tinyworld"], 0, [torch.randn(2, 256)])
