"""A progress bar for `LLM.generate`: finished requests, and tokens a second. Built in chapter 04."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress_bar(total: int, use_tqdm: bool | Callable[..., Any]) -> Iterator[Callable[[int, int], None]]:
    """A bar of finished requests with tokens a second, or nothing; gives a function (requests, tokens) that moves it.

    A callable makes the bar instead of tqdm, with tqdm's arguments. Of the bar `update`, `refresh`, `close` and the
    attribute `postfix` are used.
    """
    if not use_tqdm:
        yield lambda requests, tokens: None
        return
    from tqdm.auto import tqdm

    num_tokens, start = 0, time.monotonic()
    make = use_tqdm if callable(use_tqdm) else tqdm
    bar = make(total=total, desc="Requests", dynamic_ncols=True, postfix="0 tokens/s")

    def advance(requests: int, tokens: int) -> None:
        nonlocal num_tokens
        num_tokens += tokens
        bar.postfix = f"{num_tokens / (time.monotonic() - start):.0f} tokens/s"
        bar.update(requests)

    try:
        yield advance
        bar.refresh()
    finally:
        bar.close()
