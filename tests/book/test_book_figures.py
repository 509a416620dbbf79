"""Figures carry alt texts and the house colours; chips, tables, predictions,
widgets and streams say what they should."""

from __future__ import annotations

import base64
import io

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from PIL import Image

from minillm import book
from minillm.book import charts, engine_map, style, widgets
from minillm.book.chips import Html


@pytest.fixture(autouse=True, scope="module")
def shell():
    """`display` prints unless a shell runs; this one records."""
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def shown(run) -> list:
    """What a cell displays."""
    with capture_output() as captured:
        run()
    return [(output.data, output.metadata) for output in captured.outputs]


def draw(alt="A line rises."):
    with book.figure(alt=alt, width=4, height=2) as ax:
        ax.plot([1, 2], [1, 2])


def test_a_figure_is_shown_once_with_its_alt_text_and_a_width():
    [(data, metadata)] = shown(draw)
    assert metadata == {"image/png": {"alt": "A line rises.", "width": 400}}
    assert data["text/plain"] == "[figure] A line rises."
    image = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
    assert image.size == (640, 320) and len(base64.b64decode(data["image/png"])) < 20_000


def test_a_figure_is_the_same_bytes_every_time():
    assert shown(draw)[0][0]["image/png"] == shown(draw)[0][0]["image/png"]


@pytest.mark.parametrize("alt", ["", "  "])
def test_a_figure_without_alt_text_is_refused(alt):
    with pytest.raises(ValueError, match="needs an alt text"):
        draw(alt)


def test_colours_by_name_and_by_meaning():
    assert book.colour("ours") == book.colour("blue") == "#0072B2"
    with pytest.raises(ValueError, match="colour 'mauve'"):
        book.colour("mauve")


def test_the_palette_stays_apart_for_colour_blind_readers():
    """Lightness alone separates the roles that share a figure most often."""

    def lightness(name):
        red, green, blue = (int(book.colour(name)[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2

    for one, other in [("ours", "other"), ("good", "other"), ("ours", "prediction"), ("wasted", "background")]:
        assert abs(lightness(one) - lightness(other)) > 0.1


@pytest.mark.parametrize(
    "chapter, name, state",
    [
        (0, "machine", "current"),
        (0, "decoder", "later"),
        (1, "sampler", "current"),
        (2, "sampler", "finished"),
        (2, "attention", "current"),
        (3, "KV cache\nmanager", "current"),
        (5, "KV cache\nmanager", "finished"),
        (6, "KV cache\nmanager", "current"),
        (3, "scheduler", "later"),
    ],
)
def test_the_map_knows_what_stands(chapter, name, state):
    assert next(part for part in engine_map.PARTS if part.name == name).state(chapter) == state


def test_the_map_says_in_words_what_it_shows():
    alt = book.you_are_here(2).alt
    assert alt == (
        "Map of the engine at chapter 02; a request runs from request to scheduler to KV cache manager to "
        "runner to decoder to attention to sampler to text. Already built: sampler, text, machine. "
        "In this chapter: decoder, attention. Still to come: request, scheduler, KV cache manager, runner, "
        "server, kernels."
    )
    with pytest.raises(ValueError, match="chapter=100"):
        book.you_are_here(100)


def test_roofline_draws_the_roof_through_the_ridge():
    _, ax = book.canvas()
    book.roofline(ax, 20e9, 200e9, points={"decode": (0.5, 8e9)}, label="laptop")
    roof = [tuple(point) for point in ax.lines[0].get_xydata()]
    assert roof[1] == (10.0, 200e9) and roof[0][1] == pytest.approx(roof[0][0] * 20e9) and roof[2][1] == 200e9
    assert {text.get_text() for text in ax.texts} == {"laptop: 200 GFLOP/s", "20 GB/s", "ridge 10 FLOP/byte", "decode"}
    with pytest.raises(ValueError, match="must be positive"):
        book.roofline(ax, 0, 1)


def test_token_bars_show_what_was_kept_and_chosen():
    _, ax = book.canvas()
    book.token_bars(ax, [" a", "b\n", "$"], [0.5, 0.3, 0.2], kept=[True, True, False], chosen=1)
    assert [patch.get_width() for patch in ax.patches] == [0.5, 0.3, 0.2]
    assert [style.matplotlib.colors.to_hex(p.get_facecolor()).upper() for p in ax.patches] == [
        book.colour(c) for c in ("ours", "other", "background")
    ]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["␣a", "b⏎", r"\$"]
    with pytest.raises(ValueError, match="3 tokens but 1 prob"):
        book.token_bars(ax, ["a", "b", "c"], [1.0])


@pytest.mark.parametrize("value, said", [(1.23e10, "12.3 G"), (5e15, "5 P"), (999, "999 "), (2_000, "2 k")])
def test_engineering_prefixes(value, said):
    assert charts.engineering(value) == said


def test_token_strip_shows_spaces_ids_and_what_was_rejected():
    strip = book.token_strip(["Once", " upon", "<b>"], ids=[1, 22, 3], struck=[1], caption="three")
    assert repr(strip) == "three\nOnce:1 ~␣upon~:22 <b>:3"
    assert (
        "&lt;b&gt;" in strip._repr_html_()
        and "<b>" not in strip._repr_html_()
        and strip._repr_html_().count("line-through") == 1
    )
    with pytest.raises(ValueError, match="1 tokens but 2 ids"):
        book.token_strip(["a"], ids=[1, 2])


def test_ladder_bars_are_in_proportion():
    ladder = book.ladder_table(
        [{"rung": "slow", "chapter": "01", "tokens/s": 10.0}, {"rung": "fast", "chapter": "03", "tokens/s": 40.0}]
    )
    header, slow, fast = repr(ladder).splitlines()
    assert header.split() == ["rung", "chapter", "tokens/s"] and slow.split()[:3] == ["slow", "01", "10.0"]
    assert slow.count("█") == 7 and fast.count("█") == 28
    with pytest.raises(ValueError, match="rows is empty"):
        book.ladder_table([])


def test_a_prediction_is_shown_then_revealed():
    made = []
    [(committed, _)] = shown(lambda: made.append(book.predict("How often?", 100, unit="times")))
    assert "Your prediction: 100 times." in committed["text/plain"]
    [(_data, metadata)] = shown(lambda: made[0].reveal(5050))
    assert (
        metadata["image/png"]["alt"]
        == "How often? Predicted: 100 times; counted: 5,050 times. The result is 50.5 times the prediction."
    )
    _, ax = book.canvas()
    made[0].line(ax)
    assert list(ax.lines[0].get_ydata()) == [100, 100]


def test_the_books_prediction_is_called_so_and_its_result_is_folded():
    made = []
    [(asked, _)] = shown(lambda: made.append(book.predict("How often?", ..., book=100, unit="times")))
    assert "three dots" in asked["text/plain"] and "100" not in asked["text/plain"]
    [(data, _)] = shown(lambda: made[0].reveal(5050))
    assert data["text/html"].startswith("<details><summary>") and 'alt="How often? Predicted: 100' in data["text/html"]
    assert "image/png" not in data
    _, ax = book.canvas()
    made[0].line(ax)
    assert ax.lines[0].get_label() == "the book's prediction: 100 times"
    assert book.predict("How often?", 100, book=7).whose == "your prediction"


@pytest.mark.parametrize(
    "guess, result, said", [(5, 5, "exact"), (100, 105, "within 5 %"), (0, 3, "3 away"), (10, 2, "0.2 times")]
)
def test_verdicts(guess, result, said):
    from minillm.book.prediction import Prediction

    assert said in Prediction("?", guess).verdict(result)


@pytest.mark.parametrize("guess", ["many", None, float("nan"), True])
def test_a_prediction_is_a_number(guess):
    with pytest.raises(TypeError, match="commit one number"):
        book.predict("How often?", guess)
    with pytest.raises(TypeError, match="three dots"):
        book.predict("How often?", ...)


def bars(height, kind):
    fig, ax = book.canvas(width=3, height=1)
    ax.bar([0], [height])
    return [book.picture(fig, f"A {kind} bar of {height}."), Html(f"<b>{height}</b>", f"{height}")]


def test_explore_shows_the_static_figure_and_carries_live_knobs():
    first, second = shown(lambda: book.explore(bars, height=book.slider(1, 9, 4), kind=book.choice(["tall", "wide"])))
    assert first[1]["image/png"]["alt"] == "A tall bar of 4." and second[0]["text/html"] == "<b>4</b>"
    assert all("application/vnd.jupyter.widget-view+json" in data for data, _ in (first, second))


def test_turning_a_knob_redraws():
    controls = {"height": book.slider(1, 9, 4), "kind": book.choice(["tall", "wide"])}
    top, text = widgets._live_views(bars, controls, bars(4, "tall"))
    height, kind = top.children[0].children
    before = top.children[1].value
    height.value, kind.value = 7, "wide"
    assert text.value == "<b>7</b>" and top.children[1].value != before
    assert top.children[1].value == bars(7, "wide")[0].png


def test_explore_without_widgets_still_shows(monkeypatch):
    import builtins

    real = builtins.__import__

    def no_widgets(name, *args, **kwargs):
        if name == "ipywidgets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_widgets)
    outputs = shown(lambda: book.explore(bars, height=book.slider(1, 9, 4), kind=book.choice(["tall"])))
    assert len(outputs) == 2 and not any("widget" in mime for data, _ in outputs for mime in data)


@pytest.mark.parametrize(
    "low, high, default, step", [(0.1, 2.0, 1.0, 0.02), (0.0, 1.0, 0.5, 0.02), (0.0, 500.0, 1.0, 10.0), (1, 9, 4, 1)]
)
def test_sliders_move_in_round_steps(low, high, default, step):
    assert book.slider(low, high, default).step == pytest.approx(step)


def test_controls_check_their_defaults():
    with pytest.raises(ValueError, match="default=9"):
        book.slider(0.0, 2.0, 9)
    with pytest.raises(ValueError, match="default='z'"):
        book.choice(["a"], "z")
    with pytest.raises(TypeError, match=r"return picture\(fig, alt\)"):
        book.explore(lambda: 3)


def test_streams_take_turns_by_their_own_clocks():
    now = [0.0]

    def source(cost, pieces):
        for piece in pieces:
            now[0] += cost
            yield piece

    with capture_output() as captured:
        slow, fast = book.side_by_side_stream(
            [source(5.0, "abcd"), source(1.0, "wxyz")], ["slow", "fast"], stop_with_first=True, clock=lambda: now[0]
        )
    assert "".join(fast.pieces) == "wxyz" and fast.done and fast.seconds == 4.0 and fast.rate == 1.0
    assert "".join(slow.pieces) == "a" and slow.seconds == 5.0
    assert "fast (4 tokens · 4.00 s · 1 tokens/s · done)\nwxyz" in captured.outputs[-1].data["text/plain"]


def test_streams_run_to_the_end_unless_told_otherwise():
    with capture_output():
        lanes = book.side_by_side_stream([iter("ab"), iter("cdefg")], ["one", "two"])
    assert ["".join(lane.pieces) for lane in lanes] == ["ab", "cdefg"] and all(lane.done for lane in lanes)
    with pytest.raises(ValueError, match="1 generators but 2 labels"):
        book.side_by_side_stream([iter("a")], ["a", "b"])
