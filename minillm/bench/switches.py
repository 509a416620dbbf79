"""Optimisations switched off for a while, so that they can be compared with nothing else changed.
Built in chapter 14."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from ..kernels import native
from ..model import joined, layers

SWITCHES = {  # name -> what has to be replaced to do without
    "C kernels": (native, "library", lambda dtype=torch.float32: None),
    "packed weights": (layers, "can_pack", lambda weight: False),
    "whole layers": (native.Layer, "of", classmethod(lambda cls, *args: None)),
    "joined model": (joined, "JOINED_MODEL", False),
}


@contextmanager
def switched_off(names: tuple[str, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for name in names:
            owner, attribute, stand_in = SWITCHES[name]
            stack.enter_context(mock.patch.object(owner, attribute, stand_in))
        yield


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Small models are read and written at once: `transformers`' bars would only stand between the lines."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
