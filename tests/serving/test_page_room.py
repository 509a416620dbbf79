"""The engine room in a real browser, and the manners of the page: keyboard, screen reader, phone, colours, motion."""

from __future__ import annotations

import json
import re

import pytest

from minillm.serving.config import ServerConfig
from minillm.serving.run import RunningServer

from .browser import begin, only_refusals, say, settings, step_by_step, tile, until
from .conftest import settle


def test_the_engine_room_moves(visit, server, engine):
    page = visit(server)
    blank = page.locator("#tape").evaluate("(canvas) => canvas.toDataURL()")
    with step_by_step(engine) as step:
        page.click("#load-send")
        until(page, lambda: tile(page, "waiting") == "8")
        step(1)
        until(page, lambda: tile(page, "running") == "8" and page.locator("#rows tr").count() == 8)
        assert "prefill" in page.locator("#rows tr").first.text_content()
        step(1)
        until(page, lambda: page.locator("#rows").text_content().count("decode 1") == 8)
        assert "2: 8 requests in the batch, 8 tokens" in page.locator("#table-said").text_content()
        assert int(page.locator("#blocks-legend .owned b").text_content()) >= 8
        assert page.locator("#tape").evaluate("(canvas) => canvas.toDataURL()") != blank
    page.wait_for_selector("#load-send:enabled")
    assert page.locator("#load-said").text_content() == "8 of 8 stories told."
    until(page, lambda: tile(page, "running") == "0")
    page.focus("#step")
    page.press("#step", "Home")  # back to the first step
    assert "Step 1: 8 requests in the batch" in page.locator("#table-said").text_content()
    assert page.locator("#live").get_attribute("aria-pressed") == "false"
    page.press("#step", "ArrowRight")
    assert "Step 2: 8 requests" in page.locator("#table-said").text_content()
    page.click("#play")
    until(page, lambda: "Step 4:" in page.locator("#table-said").text_content())
    page.click("#live")
    assert page.locator("#live").get_attribute("aria-pressed") == "true"


def test_load_goes_on_until_it_is_stopped(visit, server, engine):
    page = visit(server)
    page.select_option("#load-count", "4")
    page.click("#load-keep")
    until(page, lambda: int(page.locator("#load-said").text_content().split()[0] or 0) > 4)
    page.click("#load-stop")
    page.wait_for_selector("#load-said:has-text('Stopped')")
    settle(engine)


def test_the_keyboard_suffices(visit, server):
    page = visit(server)
    page.keyboard.press("Tab")
    assert page.locator(":focus").text_content() == "Skip to the message"
    page.keyboard.press("Enter")
    assert page.locator(":focus").get_attribute("id") == "message"
    page.keyboard.type("What does a cow say?")
    page.keyboard.press("Shift+Enter")
    assert page.locator("#message").input_value().endswith("\n")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer footer")
    assert page.locator(":focus").get_attribute("id") == "message"
    reached, outlines = set(), set()
    for _ in range(40):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            "() => { const one = document.activeElement;"
            " return [one.id || one.textContent.trim(), one === document.body || getComputedStyle(one).outlineStyle]; }"
        )
        reached.add(name)
        outlines.add(outline)
    assert {
        "turns",
        "Retry",
        "load-send",
        "live",
        "play",
        "step",
        "zoom-in",
        "zoom-out",
        "load-count",
        "load-keep",
        "theme",
        "clear",
    } <= reached
    assert outlines <= {"solid", True}  # True: the end of the page


def test_everything_has_a_name(visit, server):
    page = visit(server)
    settings(page, answers="settings")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll(
            "button, input, select, textarea, [role=img], [role=log], section, dialog")]
        .filter((one) => !one.closest(".turn") && !(one.labels?.length || one.getAttribute("aria-label") ||
            one.getAttribute("aria-labelledby") || one.tagName === "BUTTON" && one.textContent.trim()))
        .map((one) => one.outerHTML)"""
    )
    assert nameless == []
    missing = page.evaluate(
        """() => [...document.querySelectorAll("[for], [aria-labelledby], [aria-describedby]")].flatMap((one) =>
        ["for", "aria-labelledby", "aria-describedby"].map((name) => one.getAttribute(name)).filter(Boolean))
        .filter((id) => !document.getElementById(id))"""
    )
    assert missing == []
    assert page.locator("[aria-live=assertive], [role=alert]").count() == 0


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_screen(visit, server, width):
    page = visit(server, viewport={"width": width, "height": 740})
    settings(page, answers="settings", schema=json.dumps({"const": "x" * 100}))
    say(page, "y" * 200)
    page.click("#load-send")
    page.wait_for_selector("#load-send:enabled")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if width == 360:
        small = page.evaluate(
            "() => [...document.querySelectorAll('button, select, input:not([type=range], [type=checkbox])')]"
            ".filter((one) => one.offsetParent && one.getBoundingClientRect().height < 30).map((one) => one.id)"
        )
        assert small == []  # a finger has to hit them


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_or_the_switch(visit, server, scheme):
    page = visit(server, color_scheme=scheme)
    assert lightness(page) == scheme
    for name in ("ink", "quiet", "accent", "wrong"):
        assert contrast(page, name, "paper") >= 4.5 and contrast(page, name, "ground") >= 4.5, name
    for name in ("decode", "prefill", "recompute", "accepted", "owned", "shared", "cached"):
        assert contrast(page, name, "paper") >= 3, name
    assert contrast(page, "on-accent", "accent") >= 4.5 and contrast(page, "on-decode", "decode") >= 4.5
    other = {"light": "dark", "dark": "light"}[scheme]
    page.select_option("#theme", other)
    assert lightness(page) == other
    page.reload()
    page.wait_for_selector("#room-state.live")
    assert lightness(page) == other and page.locator("#theme").input_value() == other


def lightness(page) -> str:
    return "light" if luminance(page, "ground") > 0.5 else "dark"


def contrast(page, one: str, other: str) -> float:
    """As WCAG defines it: 1 to 21."""
    low, high = sorted((luminance(page, one), luminance(page, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(page, name: str) -> float:
    colour = page.evaluate(
        "(name) => { const probe = document.body.appendChild(document.createElement('i'));"
        " probe.style.color = `var(--${name})`; const found = getComputedStyle(probe).color; probe.remove();"
        " return found; }",
        name,
    )
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_nothing_moves_where_motion_is_unwanted(visit, server, engine):
    page = visit(server, reduced_motion="reduce")
    with step_by_step(engine) as step:
        begin(page, "Once")
        step(2)
        until(page, lambda: page.locator(".answer").count() == 1)
        assert page.evaluate("document.getAnimations().length") == 0


def test_the_page_says_when_the_server_goes_and_waits_for_it(visit, engine):
    with RunningServer(engine) as server:
        port = server.socket.getsockname()[1]
        page = visit(server)
    page.wait_for_selector("#room-state:not(.live)")
    assert tile(page, "running") == "–"
    page.fill("#message", "Hello!")
    page.press("#message", "Enter")
    page.wait_for_selector(".error:has-text('cannot be reached')")
    with RunningServer(engine, ServerConfig(port=port)):
        page.wait_for_selector("#room-state.live")
    page.wait_for_selector("#room-state:not(.live)")
    only_refusals(page)
