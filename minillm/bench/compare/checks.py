"""Are the tokens of an engine those of the model? Checked before anything is timed. Built in chapter 14.

Equal tokens are the wrong test for bfloat16: rounding decides between two tokens whose logits are almost equal, and
after the first such choice the sequences differ. Every token is therefore checked with the tokens before it as the
engine itself generated them: `transformers` computes the logits in float32, and the logit of the token may be below the
largest one by no more than rounding explains, in standard deviations of the logits. A random token is about four below.
In float32 the tolerance admits only ties, so the tokens of all engines are equal up to the first tie.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ..switches import no_progress_bars
from .request import Request

# Measured on the SmolLM2-135M shape: 0.008 at most in float32 (llama.cpp; 0 for transformers and minillm),
# 0.54 in bfloat16.
TOLERANCE = {"float32": 0.02, "bfloat16": 1.0}
PROMPT_LENGTHS, OUTPUT_TOKENS = (16, 40, 100), 32


class OutputsDisagree(RuntimeError):
    """An engine has generated a token that the model would not."""


class Oracle:
    """The model in float32. With `gguf_type`, its matrices have the values that a GGUF file of that type holds."""

    def __init__(self, path: Path, gguf_type: str | None = None):
        from transformers import AutoModelForCausalLM

        with no_progress_bars():
            self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.vocab_size = self.model.config.vocab_size
        if gguf_type is not None:
            import gguf

            kind = gguf.GGMLQuantizationType[gguf_type]
            for weight in self.model.parameters():
                if weight.dim() == 2:
                    rounded = gguf.dequantize(gguf.quantize(weight.detach().numpy(), kind), kind)
                    weight.data.copy_(torch.from_numpy(rounded))

    @torch.inference_mode()
    def gaps(self, prompt: list[int], token_ids: list[int]) -> tuple[list[float], list[int]]:
        """For each token: how far its logit is below the largest, in standard deviations, and the token of that one."""
        logits = self.model(torch.tensor([prompt + token_ids[:-1]])).logits[0, len(prompt) - 1 :]  # [outputs, vocab]
        best = logits.max(dim=-1)
        chosen = logits.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
        return ((best.values - chosen) / logits.std(dim=-1)).tolist(), best.indices.tolist()


def check(peer: str, request: Request, token_ids: list[list[int]], oracle: Oracle, tolerance: float) -> float:
    """The largest gap of all tokens that `peer` has generated for `request`, greedily.

    Raises OutputsDisagree, which names the peer, the prompt and the position, where a gap is above `tolerance`, and
    where the number of tokens is not the requested one.
    """
    check_lengths(peer, request, token_ids)
    largest = 0.0
    for index, (prompt, made) in enumerate(zip(request.prompts, token_ids)):
        known = next((i for i, token in enumerate(made) if not 0 <= token < oracle.vocab_size), len(made))
        gaps, best = oracle.gaps(prompt, made[:known]) if known else ([], [])
        wrong = next((i for i, gap in enumerate(gaps) if not gap <= tolerance), known)
        if wrong < len(made):
            why = f"no token of a vocabulary of {oracle.vocab_size}"
            if wrong < known:
                why = f"{gaps[wrong]:.3g} standard deviations of the logits below token {best[wrong]}"
                why += f"; allowed: {tolerance}"
            where = f"{peer}, prompt {index} ({len(prompt)} tokens), position {wrong}"
            raise OutputsDisagree(f"{where}: token {made[wrong]} is {why}. No point in timing")
        largest = max(largest, *gaps)
    return largest


def check_lengths(peer: str, request: Request, token_ids: list[list[int]]) -> None:
    lengths = [len(made) for made in token_ids]
    if lengths != request.lengths:
        wrong = next((i for i, pair in enumerate(zip(lengths, request.lengths)) if pair[0] != pair[1]), len(lengths))
        raise OutputsDisagree(
            f"{peer}, prompt {wrong}: {lengths[wrong] if wrong < len(lengths) else 'no'} tokens instead of "
            f"{request.lengths[wrong] if wrong < len(request.lengths) else 'none'}"
        )


def equal_share(token_ids: list[list[int]], ours: list[list[int]]) -> float:
    """Of all tokens, the share that stands before the first difference in its sequence."""
    equal = 0
    for theirs, own in zip(token_ids, ours):
        equal += next((i for i, pair in enumerate(zip(theirs, own)) if pair[0] != pair[1]), min(len(theirs), len(own)))
    return equal / sum(map(len, ours))
