"""What calibration remembers of a product's inputs, instead of the inputs. Built in chapter 16.

Every method that looks at data asks for one of three things: how large an input gets (SmoothQuant, LLM.int8(), static
activation scales), how large it usually is (AWQ), and how inputs vary together (GPTQ, and every output error):

    |(W - Q) X|²  =  trace((W - Q) H (W - Q)ᵀ)      with H = Xᵀ X, [in, in], however many tokens were seen
"""

from __future__ import annotations

import torch
from torch import Tensor


class InputStatistics:
    """Running statistics of the inputs [num_tokens, in_features] of one product."""

    def __init__(self, in_features: int, device: torch.device | str = "cpu"):
        self.num_tokens = 0
        self.hessian = torch.zeros(in_features, in_features, device=device)  # XᵀX, float32
        self.largest = torch.zeros(in_features, device=device)  # max |x| of each input
        self.total = torch.zeros(in_features, device=device)  # sum of |x|

    def add(self, inputs: Tensor) -> None:
        """Take in some tokens' inputs, [num_tokens, in_features]."""
        inputs = inputs.float()
        self.num_tokens += inputs.shape[0]
        self.hessian += inputs.T @ inputs
        self.largest = torch.maximum(self.largest, inputs.abs().amax(0))
        self.total += inputs.abs().sum(0)

    @property
    def mean(self) -> Tensor:
        """Mean |x| of each input, [in_features]."""
        return self.total / max(self.num_tokens, 1)

    def divide(self, scales: Tensor) -> None:
        """What it would have seen, had input j been divided by scales[j]."""
        self.hessian /= scales[:, None] * scales[None, :]
        self.largest = self.largest / scales
        self.total = self.total / scales


def output_error(weight: Tensor, approximation: Tensor, hessian: Tensor) -> Tensor:
    """Squared error of each output over all tokens seen: [out_features]."""
    difference = weight.float() - approximation.float()
    return ((difference @ hessian) * difference).sum(1)
