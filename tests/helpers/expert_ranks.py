"""What each rank does in the tests of expert parallel: in a module, so that a process can import it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from minillm.model.checkpoint import load_model
from minillm.parallel.expert import ExpertParallel
from minillm.parallel.placement import Placement


def run_rank(rank: int, world_size: int, store: str, folder: Path, parts: list[Tensor], placement, results) -> None:
    """One layer of the model in `folder` on this rank's tokens; (output, rows and bytes sent) into the queue."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    try:
        model = load_model(folder, "float32", "cpu")
        layer = model.config.moe.layers[-1]
        parallel = ExpertParallel(model.layers[layer].mlp, placement and Placement(placement))
        with torch.inference_mode():
            out = parallel(parts[rank])
        results.put((rank, out.numpy(), parallel.traffic.rows, parallel.traffic.bytes))
        dist.barrier()
    except Exception as error:
        results.put((rank, f"{type(error).__name__}: {error}", 0, 0))
    finally:
        dist.destroy_process_group()
