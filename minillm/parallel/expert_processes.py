"""One layer of experts over processes, each a rank with tokens of its own. Built in chapter 21."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from minillm.model.checkpoint import load_model
from minillm.parallel.expert import ExpertParallel, ExpertTraffic
from minillm.parallel.links import Link
from minillm.parallel.placement import Placement
from minillm.parallel.processes import run_processes


def experts_in_processes(
    path: Path, layer: int, parts: Sequence[Tensor], placement: Placement | None = None, *, timeout: float = 120.0
) -> list[tuple[Tensor, ExpertTraffic]]:
    """What layer `layer` of the checkpoint `path` makes of each rank's tokens, and what each rank sent.

    parts: float32 [num_tokens, hidden_size] of each rank; a rank may have none. Raises ValueError for a layer without
    experts, and RankFailed as `run_processes` does.
    """
    return run_processes(_compute, [(Path(path), layer, part.cpu(), placement) for part in parts], timeout=timeout)


def _compute(link: Link, path: Path, layer: int, part: Tensor, placement: Placement | None):
    """What each process computes."""
    model = load_model(path, "float32", str(link.device))
    if model.config.moe is None or layer not in model.config.moe.layers:
        raise ValueError(f"layer={layer} has no experts")
    parallel = ExpertParallel(model.layers[layer].mlp, placement)
    with torch.inference_mode():
        out = parallel(part.to(link.device)).cpu()
    return out.clone(), parallel.traffic
