"""Tokenizers like SentencePiece's: neighbouring byte tokens are text only together, in a stream too."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders

from minillm import LLM, SamplingParams
from minillm.engine.detokenizer import REPLACEMENT, Detokenizer, invalid_byte_token
from tests.helpers.grammar_cases import sentencepiece_tokenizer
from tests.helpers.tiny import byte_tokenizer, examples, save_tiny_llama, seeded

SPACES, BYTES = decoders.Replace("▁", " "), decoders.ByteFallback()
DECODERS = {
    "fused": decoders.Sequence([SPACES, BYTES, decoders.Fuse()]),
    "stripped": decoders.Sequence([SPACES, BYTES, decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    "metaspace": decoders.Sequence([BYTES, decoders.Metaspace()]),
    "byte-level": None,
}


@lru_cache
def tokenizer(name: str) -> Tokenizer:
    if DECODERS[name] is None:
        return byte_tokenizer().backend_tokenizer
    made = Tokenizer.from_str(sentencepiece_tokenizer().backend_tokenizer.to_str())
    made.decoder = DECODERS[name]
    return made


def ids(*tokens: str) -> list[int]:
    return [tokenizer("stripped").token_to_id(token) for token in tokens]


def detokenizer(name: str = "stripped", skip_special_tokens: bool = True, **options) -> Detokenizer:
    def decode(token_ids: list[int]) -> str:
        return tokenizer(name).decode(token_ids, skip_special_tokens=skip_special_tokens)

    return Detokenizer(decode, invalid_byte=invalid_byte_token(tokenizer(name)), **options)


def pieces(made: Detokenizer, token_ids: list[int]) -> list[str]:
    shown = []
    for token_id in token_ids:
        shown.append(made.add(token_id))
        if made.stop_string is not None:
            break
    return [*shown, made.finish()]


E_ACUTE, BROKEN, WORD, END = "<0xC3> <0xA9>".split(), ["<0xFF>"], ["▁a"], ["</s>"]
# Characters in bytes, whole and broken, words, special tokens, and ids that no token has.
SPELLED = [
    ids(*part) for part in (E_ACUTE, BROKEN, WORD, END, ["<0x0A>"], ["▁"], "<0xF0> <0x9F> <0x98> <0x80>".split())
]
SEQUENCES = st.lists(st.sampled_from(SPELLED) | st.lists(st.integers(0, 280), max_size=2), max_size=9).map(
    lambda parts: [token_id for part in parts for token_id in part]
)


@pytest.mark.parametrize("skip_special_tokens", [True, False], ids=["skipped", "shown"])
@pytest.mark.parametrize("name", DECODERS)
def test_the_pieces_of_any_tokens_are_the_text_of_all_at_once(name, skip_special_tokens):
    @seeded
    @given(SEQUENCES, SEQUENCES)
    def equal(token_ids, prompt):
        options = dict(name=name, skip_special_tokens=skip_special_tokens)
        at_once = tokenizer(name).decode(token_ids, skip_special_tokens=skip_special_tokens)
        assert "".join(pieces(detokenizer(**options), token_ids)) == at_once
        after = dict(options, prompt_token_ids=prompt)
        assert "".join(pieces(detokenizer(**after), token_ids)) == detokenizer(**after).whole(token_ids)

    equal()


@pytest.mark.parametrize(
    "tokens, shown",
    [
        ([*WORD, *E_ACUTE, *WORD], ["a", "", "", "é a", ""]),
        ([*WORD, *E_ACUTE], ["a", "", "", "é"]),
        ([*WORD, *E_ACUTE, *BROKEN, *WORD], ["a", "", "", "", REPLACEMENT * 3 + " a", ""]),
        ([*WORD, *E_ACUTE, *END, *BROKEN], ["a", "", "", "", "", REPLACEMENT * 3]),
        ([*WORD, "<0xC3>", *WORD], ["a", "", REPLACEMENT + " a", ""]),
    ],
    ids=["goes on", "ends", "is broken", "is broken behind a special token", "half a character"],
)
def test_a_run_of_byte_tokens_is_shown_when_it_is_over(tokens, shown):
    assert pieces(detokenizer(), ids(*tokens)) == shown


def test_only_a_decoder_that_looks_at_all_bytes_together_has_an_invalid_byte():
    assert invalid_byte_token(tokenizer("byte-level")) is None
    for name in ("fused", "stripped", "metaspace"):
        assert tokenizer(name).id_to_token(invalid_byte_token(tokenizer(name))) == "<0xFF>"


# Stop strings


@pytest.mark.parametrize("tokens, stop, text", [([*WORD, "<0x0A>", *WORD], "\n", "a"), ([*WORD, *E_ACUTE], "é", "a")])
def test_a_stop_string_of_bytes_ends_the_text_with_its_last_byte(tokens, stop, text):
    made = detokenizer(stop=[stop])
    shown = pieces(made, ids(*tokens))
    assert "".join(shown) == made.text == text and made.stop_string == stop
    assert len(shown) - 1 == 1 + len(stop.encode())


@pytest.mark.parametrize("min_tokens, text", [(1, "a"), (2, "a"), (3, "aé a"), (4, "aé a")])
def test_min_tokens_counts_the_token_that_completed_the_stop_string_not_the_one_that_showed_it(min_tokens, text):
    """It completes with the third token and is shown with the fourth."""
    made = detokenizer(stop=["é"], min_tokens=min_tokens)
    assert "".join(pieces(made, ids(*WORD, *E_ACUTE, *WORD))) == made.text == text


@pytest.mark.parametrize("min_tokens, text", [(0, "go on "), (1, "go on "), (2, "go on STOP😀"), (3, "go on STOP😀")])
def test_a_stop_string_may_share_its_token_with_half_a_character(min_tokens, text):
    """A stop string completes with the second token, whose last character the third one completes."""
    first, second, third = b"go on ", "STOP😀".encode()[:-2], "😀".encode()[-2:]

    def decode(token_ids: list[int]) -> str:
        return b"".join([first, second, third][token_id] for token_id in token_ids).decode(errors="replace")

    made = Detokenizer(decode, stop=["STOP"], min_tokens=min_tokens)
    assert "".join(pieces(made, [0, 1, 2])) == made.text == text


LETTERS = st.text("ab é😀", min_size=1, max_size=16)


@examples(150)
@given(
    LETTERS, st.lists(st.text("ab é😀", min_size=1, max_size=3), min_size=1, max_size=2), st.integers(0, 20), st.data()
)
def test_a_text_ends_where_a_stop_string_completes_behind_min_tokens(text, stop, min_tokens, data):
    """However its bytes are divided into tokens: of all that complete with a token, the first counts."""
    written = text.encode()
    cuts = sorted({0, len(written), *data.draw(st.lists(st.integers(0, len(written)), max_size=12))})
    vocabulary = [written[begin:end] for begin, end in pairwise(cuts)]

    def decode(token_ids: list[int]) -> str:
        return b"".join(vocabulary[token_id] for token_id in token_ids).decode(errors="replace")

    made = Detokenizer(decode, stop=stop, min_tokens=min_tokens)
    pieces(made, list(range(len(vocabulary))))
    whole = [len(written[:end].decode(errors="ignore")) for end in cuts]  # characters after each token
    ends = [
        (end, start)
        for one in stop
        for start in range(len(text))
        if text.startswith(one, start)
        for end in [start + len(one)]
        if next(count for count, length in enumerate(whole) if length >= end) > min_tokens
    ]
    assert made.text == (text[: min(ends)[1]] if ends else text)


# The engine


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    folder = tmp_path_factory.mktemp("byte-fallback")
    save_tiny_llama(folder, vocab_size=280, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    tokenizer("stripped").save(str(folder / "tokenizer.json"))
    return LLM(str(folder), device="cpu", max_model_len=128)


def test_a_stream_says_what_generate_says(llm):
    shown = [{}, dict(skip_special_tokens=False), dict(stop=["é", "a\n"], min_tokens=4), dict(stop=["b"])]
    params = [
        SamplingParams(temperature=1.5, seed=seed, max_tokens=24, ignore_eos=seed > 9, **shown[seed % 4])
        for seed in range(40)
    ]
    streamed = [""] * len(params)

    def listen(index):
        def on_delta(sink, delta):
            streamed[index] += delta.text

        return on_delta

    sinks = [llm.submit("name é", one, on_delta=listen(index), streaming=True) for index, one in enumerate(params)]
    while llm.step():
        pass
    outputs = llm.generate(["name é"] * len(params), params, use_tqdm=False)
    for text, sink, output in zip(streamed, sinks, outputs, strict=True):
        assert sink.output().outputs[0].token_ids == output.outputs[0].token_ids
        assert text == sink.output().outputs[0].text == output.outputs[0].text
