"""Memory for a step's logits that is kept from step to step. Built in chapter 14."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.model.decoder import Decoder

MOST_ROWS = 64  # that are kept


class LogitsRoom:
    """Where a CPU widens a step's logits to float32. Memory that is taken anew is cleared first, page by page."""

    def __init__(self, model: Decoder):
        is_widened = model.dtype is not torch.float32 and model.device.type == "cpu"
        self.vocab_size = model.config.vocab_size if is_widened and isinstance(model, Decoder) else None
        self.kept = torch.empty(0, self.vocab_size or 0)

    def of(self, num_logits: int) -> Tensor | None:
        """[num_logits, vocab_size] that hold anything, until it is asked again; None where that saves nothing."""
        if self.vocab_size is None or num_logits > MOST_ROWS:
            return None
        if num_logits > len(self.kept):
            self.kept = torch.empty(num_logits, self.vocab_size)
        return self.kept[:num_logits]
