"""The incremental detokenizer: whole characters, the same text as at once, stop strings never shown."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from minillm.engine.detokenizer import REPLACEMENT, Detokenizer
from minillm.engine.outputs import CompletionOutput
from minillm.engine.transcript import kept_tokens
from tests.helpers.grammar_cases import sentencepiece_tokenizer
from tests.helpers.tiny import VOCAB_SIZE, byte_tokenizer, seeded

TOKENIZER = byte_tokenizer()


def decode(token_ids: list[int]) -> str:
    return TOKENIZER.backend_tokenizer.decode(token_ids, skip_special_tokens=True)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def pieces(token_ids: list[int], stop=(), min_tokens: int = 0) -> tuple[list[str], Detokenizer]:
    """What each token lets be shown, then what the end does, as a stream would show it."""
    detokenizer, shown = Detokenizer(decode, stop=stop, min_tokens=min_tokens), []
    for token_id in token_ids:
        shown.append(detokenizer.add(token_id))
        if detokenizer.stop_string is not None:
            break
    shown.append(detokenizer.finish())
    return shown, detokenizer


LIKELY = st.sampled_from("😀👍🏽日é a\u200d🇫🇷" + REPLACEMENT)
TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]) | LIKELY)


@seeded
@given(TEXTS)
def test_any_text_comes_out_as_it_went_in(text):
    shown, detokenizer = pieces(encode(text))
    assert "".join(shown) == detokenizer.text == text


@seeded
@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60))
def test_any_tokens_give_the_text_of_decoding_at_once(token_ids):
    shown, detokenizer = pieces(token_ids)
    assert "".join(shown) == detokenizer.text == decode(token_ids)


@seeded
@given(TEXTS)
def test_no_half_character_is_ever_shown(text):
    text = text.replace(REPLACEMENT, "")
    shown, _ = pieces(encode(text))
    so_far = ""
    for piece in shown:
        so_far += piece
        assert REPLACEMENT not in piece and text.startswith(so_far)


def test_an_emoji_waits_for_its_last_byte():
    token_ids = encode("🦜")
    assert len(token_ids) == 3  # its first two bytes have merged, they begin most emoji
    assert pieces(token_ids)[0] == ["", "", "🦜", ""]
    assert pieces(token_ids[:2])[0] == ["", "", REPLACEMENT]


def test_text_is_shown_as_soon_as_it_is_whole():
    token_ids = encode("the cat 10")
    assert pieces(token_ids)[0] == [decode([token_id]) for token_id in token_ids] + [""]


def test_special_tokens_have_no_text_and_hide_none():
    token_ids = [0, *encode("a😀"), 1, *encode(" b")]
    assert "".join(pieces(token_ids)[0]) == "a😀 b"


def test_a_prompt_that_ends_in_half_a_character_is_completed():
    first, *rest = encode("🦜")
    detokenizer = Detokenizer(decode, [*encode("the "), first])
    assert [detokenizer.add(token_id) for token_id in rest] == ["", "🦜"]


def test_the_window_stays_short():
    widest = 0

    def watched(token_ids):
        nonlocal widest
        widest = max(widest, len(token_ids))
        return decode(token_ids)

    detokenizer = Detokenizer(watched, encode("the cat sat on the mat " * 20))
    for token_id in encode("the cat sat on the mat 😀 " * 50):
        detokenizer.add(token_id)
    assert widest <= 8


# Few letters, so that stop strings occur, overlap and nearly occur; single letters, so that they span tokens.
LETTERS = st.text("ab😀", max_size=30)


@seeded
@given(LETTERS, st.lists(st.text("ab😀", min_size=1, max_size=5), min_size=1, max_size=3))
def test_stop_strings_cut_the_text_and_never_leak(text, stop):
    token_ids = [token_id for letter in text for token_id in encode(letter)]
    shown, detokenizer = pieces(token_ids, stop)
    # Letter by letter the stop string that ends first wins, and cuts where it begins.
    ends = [(text.find(one) + len(one), text.find(one)) for one in stop if one in text]
    expected = text[: min(ends, key=lambda end: (end[0], end[1]))[1]] if ends else text
    assert "".join(shown) == detokenizer.text == expected
    assert (detokenizer.stop_string is None) == (not ends)
    assert all(one not in "".join(shown) for one in stop)


def test_a_stop_string_over_many_tokens():
    token_ids = [token_id for letter in "go on STOP never" for token_id in encode(letter)]
    shown, detokenizer = pieces(token_ids, ["STOP"])
    assert "".join(shown) == "go on " and detokenizer.stop_string == "STOP"
    assert len(shown) == len("go on STOP") + 1  # it ends with the P


def test_a_false_alarm_is_shown_when_it_passes():
    token_ids = [token_id for letter in "a STO a" for token_id in encode(letter)]
    assert pieces(token_ids, ["STOP"])[0] == ["a", " ", "", "", "", "STO ", "a", ""]


def test_what_waits_for_a_stop_string_is_shown_at_the_end():
    token_ids = [token_id for letter in "a STO" for token_id in encode(letter)]
    assert pieces(token_ids, ["STOP"])[0] == ["a", " ", "", "", "", "STO"]


def test_a_token_may_hold_the_stop_string_inside():
    vocabulary = ["one, two", ". Three"]
    detokenizer = Detokenizer(lambda ids: "".join(vocabulary[token_id] for token_id in ids), stop=["Th", ". "])
    assert [detokenizer.add(0), detokenizer.add(1)] == ["one, two", ""]
    assert detokenizer.stop_string == ". " and detokenizer.text == "one, two"


@seeded
@given(LETTERS, st.lists(st.text("ab😀", min_size=1, max_size=5), min_size=1, max_size=3), st.data())
def test_where_a_text_ends_does_not_depend_on_its_tokens(text, stop, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    vocabulary = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)])]
    whole = Detokenizer(lambda ids: "".join(vocabulary[token_id] for token_id in ids), stop=stop)
    shown = ""
    for token_id in range(len(vocabulary)):
        shown += whole.add(token_id)
        if whole.stop_string is not None:
            break
    _, letters = pieces([token_id for letter in text for token_id in encode(letter)], stop)
    assert shown + whole.finish() == whole.text == letters.text and whole.stop_string == letters.stop_string


def test_of_two_stop_strings_the_one_that_completes_first_ends_the_text():
    for vocabulary in (["a b c d"], ["a b", " c d"], ["a", " b ", "c", " d"]):
        detokenizer = Detokenizer(lambda ids: "".join(vocabulary[token_id] for token_id in ids), stop=["b c d", "c"])
        for token_id in range(len(vocabulary)):
            if detokenizer.stop_string is None:
                detokenizer.add(token_id)
        assert (detokenizer.text, detokenizer.stop_string) == ("a b ", "c")


CUTS = [(0, ""), (1, "ab"), (2, "aba"), (3, "aba"), (4, "ababa"), (5, "ababa"), (6, "abababa"), (9, "abababa")]


@pytest.mark.parametrize("min_tokens, shown", CUTS)
def test_a_stop_string_counts_when_it_completes_after_min_tokens(min_tokens, shown):
    token_ids = [token_id for letter in "abababa" for token_id in encode(letter)]
    _, detokenizer = pieces(token_ids, ["a" if min_tokens < 2 else "b"], min_tokens)
    assert detokenizer.text == shown


@pytest.mark.parametrize(
    "min_tokens, text", [(0, "go on "), (7, "go on "), (9, "go on "), (10, "go on STOP now"), (99, "go on STOP now")]
)
def test_a_stop_string_may_begin_before_min_tokens(min_tokens, text):
    """It begins with the seventh token and completes with the tenth."""
    token_ids = [token_id for letter in "go on STOP now" for token_id in encode(letter)]
    shown, detokenizer = pieces(token_ids, ["STOP"], min_tokens)
    assert "".join(shown) == detokenizer.text == text
    assert (detokenizer.stop_string == "STOP") == (min_tokens < 10)


def test_a_stop_string_that_completed_too_early_may_occur_again():
    token_ids = [token_id for letter in "aaaa" for token_id in encode(letter)]
    shown, detokenizer = pieces(token_ids, ["aa"], min_tokens=2)
    assert "".join(shown) == "a" and detokenizer.stop_string == "aa" and len(shown) == 4  # letters 2 and 3


def test_a_text_with_characters_of_its_own_leaves_half_a_character_to_the_prompt():
    """Of a run of byte tokens that is no text, SentencePiece's decoder makes one replacement a byte."""
    tokenizer = sentencepiece_tokenizer()
    half, *rest = tokenizer.convert_tokens_to_ids(["<0xC3>", "<0xC3>", "<0xBC>", "a"])
    for prompt in ([half], [*tokenizer.encode("name"), half]):
        detokenizer = Detokenizer(tokenizer.decode, prompt, begins_whole=True)
        assert detokenizer.whole(rest) == "üa"
        assert [detokenizer.add(token_id) for token_id in rest] == ["", "ü", "a"]
        kept = kept_tokens(tokenizer.decode, prompt, CompletionOutput(0, "ü", rest, stop_reason="a"), begins_whole=True)
        assert kept == (rest[:2], "")
