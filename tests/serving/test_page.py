"""The page in a real browser, where Chromium and Playwright are installed; its files and headers everywhere."""

from __future__ import annotations

import json
import re

import httpx

from minillm.serving.keys import Key
from minillm.serving.page import FOLDER, MEDIA_TYPES

from .browser import answers, begin, only_refusals, say, settings, step_by_step, until
from .conftest import settle, wait_until

HOSTILE = "<img src=x onerror=window.harmed=1>"
ASSETS = sorted(path for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES)


def test_the_page_needs_nothing_from_elsewhere():
    assert {path.suffix for path in ASSETS} == set(MEDIA_TYPES)
    for path in ASSETS:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(https?:)?//[a-z0-9-]+\.", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), path.name
        assert len(text.splitlines()) <= 300, path.name
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)", html)  # the policy would refuse them


def test_what_is_sent_and_what_it_forbids(serve):
    http = httpx.Client(base_url=serve().url)
    for path in ("/", *(f"/page/{asset.name}" for asset in ASSETS)):
        answer = http.get(path)
        policy = answer.headers["content-security-policy"]
        assert answer.status_code == 200 and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "*" not in policy and "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = http.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert again.status_code == 304 and not again.content
        assert http.head(path).status_code == 200
    assert http.get("/").headers["content-type"] == "text/html; charset=utf-8"
    for path in ("/page/__init__.py", "/page/..%2fapp.py", "/page/", "/page/none.js"):
        assert http.get(path).status_code == 404, path


def test_without_the_page_there_is_no_page(serve):
    url = serve(page=False).url
    for path in ("/", "/page/page.js", "/engine_room"):
        answer = httpx.get(url + path)
        assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"


def test_an_answer_streams(visit, server, engine):
    page = visit(server)
    settings(page, max_tokens="30", temperature="0")
    with step_by_step(engine) as step:
        begin(page, "Tell me a story about a fox.")
        step(8)
        until(page, lambda: len(answers(page)[0]) > 8)
        [first] = answers(page)
        assert page.locator("#send").is_disabled()
        step(8)
        until(page, lambda: len(answers(page)[0]) > len(first) + 8)
        assert answers(page)[0].startswith(first) and not page.locator(".answer footer").count()
    page.wait_for_selector("#stop:disabled")
    assert "30 tokens" in page.locator(".answer footer").text_content()
    assert answers(page)[0] in page.locator("#chat-status").text_content()  # told to a screen reader, once


def test_stop_aborts_and_retry_asks_again(visit, server, engine):
    page = visit(server)
    with step_by_step(engine) as step:
        begin(page, "Tell me a story about a fox.")
        step(4)
        until(page, lambda: len(answers(page)[0]) > 2)
        page.click("#stop")
        page.wait_for_selector(".answer footer:has-text('stopped')")
        wait_until(lambda: not server.service.calls)
    settle(engine)  # no request is left, no block is owned
    page.get_by_role("button", name="Retry").click()
    page.wait_for_selector(".answer footer:has-text('complete')")
    assert len(answers(page)) == 1


def test_two_answers_stand_side_by_side(visit, server):
    page = visit(server)
    for kind in ("samples", "settings"):
        settings(page, answers=kind, temperature="0.7")
        say(page, "Tell me a story about an owl.")
        places = [one.bounding_box() for one in page.locator(".turn:last-child .answer").all()]
        assert len(places) == 2 and places[0]["y"] == places[1]["y"] and places[0]["x"] < places[1]["x"]
    texts = answers(page)
    assert len(texts) == 4 and all(texts) and len(set(texts)) > 2
    labels = page.locator(".turn:last-child .label").all_text_contents()
    assert "temperature 0.7" in labels[0] and "temperature 1.4" in labels[1]
    page.get_by_role("button", name="Continue with this").last.click()
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    settings(page, answers="one")
    say(page, "Thank you!")
    told = [message["content"] for message in bodies[0]["messages"]]
    assert told == ["Tell me a story about an owl.", texts[0], "Tell me a story about an owl.", texts[3], "Thank you!"]


def test_an_adapter_is_chosen_by_its_name(visit, server):
    page = visit(server)
    card = {"object": "model", "created": 0, "owned_by": "minillm", "root": "x", "max_model_len": 99}
    cards = [card | {"id": "base"}, card | {"id": HOSTILE, "parent": "base"}, card | {"id": "pirate", "parent": "base"}]
    page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": cards}))
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    page.click("#settings summary")
    page.wait_for_selector("#model optgroup option", state="attached")
    assert page.locator("#model optgroup option").all_text_contents() == [HOSTILE, "pirate"]
    settings(page, model="pirate", answers="settings")
    say(page, "Hello!")
    assert sorted(body["model"] for body in bodies) == ["base", "pirate"]
    assert "model='pirate' is not served here" in page.locator(".error").first.text_content()
    only_refusals(page)


def test_an_answer_follows_a_schema(visit, server):
    page = visit(server)
    settings(page, schema='{"type": "object"')
    assert page.locator("#schema").get_attribute("aria-invalid") == "true"
    page.click("#schema-example")
    assert page.locator("#schema").get_attribute("aria-invalid") == "false"
    say(page, "Who is it?")
    [text] = answers(page)
    answer = json.loads(text)
    assert set(answer) == {"name", "age"} and type(answer["age"]) is int
    assert "✓ valid JSON" in page.locator(".answer footer").text_content()


def test_hostile_text_is_only_text(visit, server):
    page = visit(server)
    settings(page, schema=json.dumps({"const": HOSTILE}))  # the model can write nothing else
    say(page, HOSTILE)
    assert json.loads(answers(page)[0]) == HOSTILE
    assert HOSTILE in page.locator(".asked").text_content()
    settings(page, schema=json.dumps({"type": HOSTILE}))
    say(page, "Once")
    assert HOSTILE in page.locator(".error").text_content()
    assert not page.locator("#turns img").count() and page.evaluate("window.harmed") is None
    only_refusals(page)


def test_an_error_is_told_in_the_words_of_the_server(visit, server):
    page = visit(server)
    settings(page, max_tokens="-3")
    say(page, "Hello!")
    said = page.locator(".error").text_content()
    expected = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": -3, "temperature": 0.7},
    )
    assert expected.status_code == 400 and expected.json()["error"]["message"] in said
    settings(page, max_tokens="9")
    page.get_by_role("button", name="Retry").click()
    page.wait_for_selector(".answer footer:has-text('tokens')")
    assert answers(page)[0]
    only_refusals(page)


def test_a_key_is_asked_for_and_kept_in_the_tab(visit, serve):
    server = serve(keys=(Key("sk-right"),))
    page = visit(server, is_let_in=False)
    page.wait_for_selector("#key-dialog[open]")
    assert "is missing" in page.locator("#key-said").text_content()
    page.keyboard.type("sk-wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("#key-said:has-text('not recognised')")
    page.wait_for_selector("#key-dialog[open]")
    page.keyboard.type("sk-right")
    page.keyboard.press("Enter")
    page.wait_for_selector("#room-state.live")
    say(page, "Hello!")
    assert answers(page)[0]
    stored = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])")
    assert "sk-" not in stored and "sk-" not in page.content()
    page.reload()
    page.wait_for_selector("#key-dialog[open]")  # it was in memory alone
    page.fill("#key", "sk-right")
    page.check("#key-keep")
    page.click("#key-ok")
    page.wait_for_selector("#room-state.live")
    page.reload()
    page.wait_for_selector("#room-state.live")
    assert not page.locator("#key-dialog[open]").count()
    assert "sk-" not in page.evaluate("JSON.stringify({...localStorage})")
    only_refusals(page)
