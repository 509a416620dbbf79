"""What a visitor of the page does, for the tests in a real browser."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .conftest import PATIENCE, wait_until


def until(page, condition: Callable[[], bool]) -> None:
    """Wait while the page goes on. (The page's policy forbids `wait_for_function`, which evaluates a string.)"""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        page.wait_for_timeout(10)


def say(page, text: str) -> None:
    begin(page, text)
    page.wait_for_selector("#stop:disabled")


def begin(page, text: str) -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")


def answers(page) -> list[str]:
    return page.locator(".answer .text").all_text_contents()


def settings(page, **values: str) -> None:
    if page.locator("#settings").get_attribute("open") is None:
        page.click("#settings summary")
    for name, value in values.items():
        field = page.locator(f"#{name.replace('_', '-')}")
        field.select_option(value) if name in ("answers", "model", "theme") else field.fill(value)


@contextmanager
def step_by_step(engine) -> Iterator[Callable[[int], None]]:
    """The engine takes no step but those that are asked for."""
    engine.thread.pause()

    def step(times: int) -> None:
        wait_until(lambda: engine.llm.engine.has_unfinished)
        for _ in range(times):
            engine.llm.step_once()

    try:
        yield step
    finally:
        engine.thread.resume()


def tile(page, name: str) -> str:
    return page.locator(f"#tile-{name}").evaluate("(tile) => tile.firstChild.textContent")


def only_refusals(page) -> None:
    """The browser logs each answer of 400 and above; nothing else was logged."""
    assert all("Failed to load resource" in problem for problem in page.problems), page.problems
    page.problems.clear()
