"""The tokenizer of a GGUF file: what the file says, and llama.cpp's defaults for what it leaves out."""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise, product
from unicodedata import normalize

import pytest
from hypothesis import given, strategies as st
from transformers import GPT2Tokenizer, Qwen2Tokenizer

from minillm.model.checkpoint import CheckpointError, load_tokenizer
from minillm.model.gguf_splits import SPLITS
from minillm.model.gguf_tokenizer import end_token_ids, gguf_tokenizer
from tests.helpers.gguf_vocabulary import CONTROL, USER_DEFINED, byte_level, keys, learned, sentencepiece, write
from tests.helpers.grammar_cases import sentencepiece_tokenizer
from tests.helpers.tiny import TEXT, examples, seeded

# A text that every way of cutting cuts in its own way, and the words that the models of each name were trained on.
TELLING = "o'Llama McDON's café $12345!?\n\n  日本word…\t/x=`नमस्ते  \n\ny "
WORDS = {
    "default": "o|'|Llama| McDON|'|s| café| |$|123|45|!?|\n\n | 日本word|…|\t|/|x|=|`|नमस|्|त|े|  \n|\n|y| ",
    "gpt-2": "o|'|Llama| McDON|'s| café| $|12345|!?|\n\n | 日本word|…|\t|/|x|=`|नमस|्|त|े|  \n|\n|y| ",
    "starcoder": "o|'|Llama| McDON|'s| café| $|1|2|3|4|5|!?|\n\n | 日本word|…|\t|/|x|=`|नमस|्|त|े|  \n|\n|y| ",
    "falcon": "o|'|Llama| McDON|'|s| café| |$|123|45|!?|\n\n | 日本word|…|\t|/|x|=`|नमस|्|त|े|  \n|\n|y| ",
    "llama-bpe": "o|'Ll|ama| McDON|'s| café| $|123|45|!?\n\n| | 日本word|…|\t|/x|=`|नमस|्त|े|  \n\n|y| ",
    "qwen2": "o|'Ll|ama| McDON|'s| café| $|1|2|3|4|5|!?\n\n| | 日本word|…|\t|/x|=`|नमस|्त|े|  \n\n|y| ",
    "qwen35": "o|'Ll|ama| McDON|'s| café| $|1|2|3|4|5|!?\n\n| | 日本word|…|\t|/x|=`|नमस्ते|  \n\n|y| ",
    "ufakzeka": "o|'Llama| McDON|'s| café| $|1|2|3|4|5|!?\n\n| | 日本word|…|\t|/x|=`|नमस|्त|े|  \n\n|y| ",
    "laguna": "o|'Ll|ama| McDON|'s| café| $|1|2|3|4|5|!?|\n\n| | 日本word|…|\t|/x|=`|नमस|्त|े|  |\n\n|y| ",
    "tekken": "o|'Llama| Mc|DON|'s| café| $|1|2|3|4|5|!?\n\n| | 日本word|…|\t|/x|=`|नमस्ते|  \n\n|y| ",
    "gpt-4o": "o'Ll|ama| Mc|DON's| café| $|123|45|!?\n\n| | 日本word|…|\t|/x|=`|नमस्ते|  \n\n|y| ",
    "tiny_aya": "o'Ll|ama| Mc|DON's| café| $|12|345|!?\n\n| | 日本word|…|\t|/x|=`|नमस्ते|  \n\n|y| ",
    "deepseek-llm": "o|'|Llama| McDON|'|s| caf|é| $|12345|!?|\n|\n|  |日本|word|…|\t/|x|=`|नमस्ते|  |\n|\n|y| ",
    "deepseek-coder": "o|'|Llama| McDON|'|s| café| $|1|2|3|4|5|!?|\n|\n| | |日本|word|…|\t/|x|=`|नमस|्|त|े|  |\n|\n|y| ",
    "deepseek-v3": "o|'Llama| McDON|'s| café| $|123|45|!?\n\n|  |日本|word|…|\t|/x|=`|नमस्ते|  \n\n|y| ",
    "spark2_5": "o|'Llama| McDON|'s| café| $|1|2|3|4|5|!?|\n|\n|  |日本|word|…|\t|/x|=`|नमस्ते|  \n|\n|y| ",
    "poro-chat": "o'Llama| McDON's| café| $12345|!?\n\n | 日本word|…\t|/x=`नमस्ते|  \n\n|y| ",
    "viking": "o'Llama| McDON's| café| $|1|2|3|4|5|!?\n\n | 日本word|…\t|/x=`नमस्ते|  \n\n|y| ",
    "seed-coder": "o|'Ll|ama| McDON|'s| café| $|1|2|3|4|5|!?|\n\n| | 日本word|…|\t|/x|=`|नमस|्त|े|  \n\n|y| ",
    "exaone-moe": "o|'Ll|ama McDON|'s| café| $|1|2|3|4|5|!?\n|\n| | 日本word|…|\t|/x|=`|नमस्ते|  \n\n|y| ",
}
VOCAB, MERGES = learned(TEXT + TELLING)
LETTERS = "the cat's MAT 12345 'LL,.!?\n\t\r\u00a0\u3000日本語éñनमस्ते😀"
TEXTS = st.text(st.sampled_from(LETTERS) | st.characters(codec="utf-8"), max_size=40)
LONGER = ["".join(letters) for length in (2, 3, 4) for letters in product("ab▁", repeat=length)]
SPECIAL = {"<|end|>": CONTROL, "<tool>": USER_DEFINED, "    ": USER_DEFINED}


def encode(metadata: dict, text: str) -> list[str]:
    """The tokens of a text, special ones included."""
    tokenizer = gguf_tokenizer(metadata)
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))


# Words


@pytest.mark.parametrize("pre", WORDS)
def test_a_text_is_cut_into_the_words_of_its_name(pre):
    tokenizer = gguf_tokenizer(byte_level(VOCAB, MERGES, pre, add_bos_token=False)).backend_tokenizer
    cuts = [places for _, places in tokenizer.pre_tokenizer.pre_tokenize_str(TELLING)]
    assert [TELLING[begin:end] for begin, end in cuts] == WORDS[pre].split("|")
    assert tokenizer.decode(tokenizer.encode(TELLING).ids) == TELLING


def test_the_text_tells_every_way_of_cutting():
    untold = {split.patterns for split in SPLITS.values()} - {SPLITS[pre].patterns for pre in WORDS}
    assert untold == {SPLITS["minicpm5"].patterns}  # llama-bpe's words, of which all digits were cut before
    assert len(set(WORDS.values())) == len(WORDS)


@pytest.mark.parametrize("pre, theirs", [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)])
def test_tokens_are_those_of_the_tokenizer_that_was_converted(pre, theirs):
    ours, theirs = gguf_tokenizer(byte_level(VOCAB, MERGES, pre)), theirs(vocab=VOCAB, merges=MERGES)

    @seeded
    @given(TEXTS.map(partial(normalize, "NFC")))  # of which transformers' Qwen2 makes every text, and llama.cpp none
    def equal(text):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text)) == text

    equal()


@pytest.mark.parametrize("pre, expected", [("qwen2", ["th", "at"]), ("llama-bpe", ["that"])])
def test_a_word_that_is_a_token_needs_no_merges_where_the_name_says_so(pre, expected):
    vocab = learned("th at " * 9, 258)[0]
    merges = [("t", "h"), ("a", "t")]
    vocab = {
        token: index for index, token in enumerate([*filter(lambda token: len(token) == 1, vocab), "th", "at", "that"])
    }
    assert encode(byte_level(vocab, merges, pre, add_bos_token=False), "that") == expected


# Special tokens


@pytest.mark.parametrize(
    "pre, said, expected",
    [
        ("llama-bpe", None, True),
        ("tekken", None, True),
        ("qwen2", None, False),
        ("deepseek-llm", None, False),
        ("llama-bpe", False, False),
        ("deepseek-llm", True, True),
    ],
)
def test_a_text_begins_with_bos_where_the_file_or_llama_cpp_says_so(pre, said, expected):
    stated = {} if said is None else {"add_bos_token": said}
    metadata = byte_level(VOCAB, MERGES, pre, {"<s>": CONTROL}, bos_token_id=len(VOCAB), **stated)
    assert encode(metadata, "a") == ["<s>"] * expected + ["a"]


def test_a_text_ends_with_eos_where_the_file_says_so():
    metadata = byte_level(VOCAB, MERGES, "qwen2", {"</s>": CONTROL}, eos_token_id=len(VOCAB), add_eos_token=True)
    assert encode(metadata, "a") == ["a", "</s>"]


def test_special_tokens_have_the_ids_of_the_file():
    special = {f"<{name}>": CONTROL for name in ("s", "e", "u", "p")}
    first = len(VOCAB)
    stated = {f"{name}_token_id": first + at for at, name in enumerate(("bos", "eos", "unknown", "padding"))}
    tokenizer = gguf_tokenizer(byte_level(VOCAB, MERGES, "qwen2", special, **stated))
    ids = [getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")]
    assert ids == [first, first + 1, first + 2, first + 3] and len(tokenizer) == first + 4


@pytest.mark.parametrize(
    "metadata, expected",
    [
        (keys(model="gpt2", eos_token_id=3, eot_token_id=5, eom_token_id=3), [3, 5]),
        (keys(model="gpt2"), []),
        (keys(model="llama"), [2]),
        (keys(model="llama", eos_token_id=7), [7]),
        (keys(model="gpt2", eos_token_id=0, tokens=["a", "<|eot_id|>", "<|im_end|>"], token_type=[3, 3, 1]), [0, 1]),
        (keys(model=["llama"], eos_token_id=0, tokens="a", token_type=3), [0]),
    ],
    ids=["stated", "none", "llama.cpp's default", "stated instead", "a control token by its text", "damaged elsewhere"],
)
def test_a_text_ends_with_the_tokens_of_the_file_and_those_whose_text_says_so(metadata, expected):
    assert end_token_ids(metadata) == expected


def test_tokens_of_their_own_are_cut_out_of_the_text_and_only_control_tokens_are_not_shown():
    metadata = byte_level(VOCAB, MERGES, "llama-bpe", SPECIAL, add_bos_token=False)
    tokenizer = gguf_tokenizer(metadata)
    assert encode(metadata, "a<|end|>b<tool>     c") == ["a", "<|end|>", "b", "<tool>", "    ", "Ġc"]
    token_ids = tokenizer.encode("a<|end|>b<tool>     c")
    assert tokenizer.decode(token_ids) == "a<|end|>b<tool>     c"
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "ab<tool>     c"


def test_the_chat_template_is_that_of_the_file():
    template = {"tokenizer.chat_template": "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"}
    tokenizer = gguf_tokenizer(byte_level(VOCAB, MERGES, "qwen2") | template)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<hi>"
    assert gguf_tokenizer(byte_level(VOCAB, MERGES, "qwen2")).chat_template is None


# SentencePiece


def by_score(metadata: dict, text: str) -> list[str]:
    """SentencePiece's rule as it is told: of all neighbours merge those that give the best token."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        found = [(-scores[tokens.index(a + b)], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in tokens]
        if not found:
            break
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        token
        for part in parts
        for token in ([part] if part in tokens else [f"<0x{byte:02X}>" for byte in part.encode()])
    ]


def scored(pieces: list[str], **more) -> dict:
    """A vocabulary of SentencePiece: three special tokens, all bytes, then `pieces`, the best first."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    return keys(
        model="llama",
        tokens=["<unk>", "<s>", "</s>", *bytes_, *pieces],
        token_type=[2, 3, 3] + [6] * 256 + [1] * len(pieces),
        scores=[0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        **more,
    )


@examples(200)
@given(st.permutations(LONGER), st.data())
def test_the_best_neighbours_are_merged_first(longer, data):
    metadata = scored([*longer[: data.draw(st.integers(0, 60))], "a", "b", "▁"])
    text = data.draw(st.text("ab ñ", max_size=14))
    assert encode(metadata, text) == ["<s>", *by_score(metadata, text)]


def test_of_two_pairs_that_give_the_same_token_the_left_one_is_merged():
    pieces = ["ell", "lle", "elle", "el", "ll", "le", "e", "l", "▁"]
    metadata = scored(pieces, add_bos_token=False, add_space_prefix=False)
    for text in ("ellelle", "elleelle", "lleell"):
        assert encode(metadata, text) == by_score(metadata, text)[1:], text


def test_a_converted_tokenizer_of_sentencepiece_is_the_same():
    ours, theirs = gguf_tokenizer(sentencepiece(sentencepiece_tokenizer())), sentencepiece_tokenizer()

    @seeded
    @given(st.text(st.sampled_from("a bnme:é name ü") | st.characters(codec="utf-8"), max_size=30))
    def equal(text):
        token_ids = theirs.encode(text)
        assert ours.encode(text) == [1, *token_ids]
        assert ours.backend_tokenizer.decode(token_ids) == theirs.backend_tokenizer.decode(token_ids).removeprefix(" ")

    equal()
    assert ours.encode("name</s>name") == [1, *theirs.encode("name</s>name")]
    assert (ours.unk_token, ours.bos_token, ours.eos_token) == ("<unk>", "<s>", "</s>")


def test_sentencepiece_has_llama_cpps_defaults_and_what_the_file_says_instead():
    pieces = ["▁a", "▁", "a"]
    assert encode(scored(pieces), "a") == ["<s>", "▁a"]
    assert encode(scored(pieces, add_space_prefix=False), "a") == ["<s>", "a"]
    assert encode(scored(pieces, add_bos_token=False, add_eos_token=True), "a") == ["▁a", "</s>"]
    assert encode(scored(pieces, bos_token_id=2), "a") == ["</s>", "▁a"]
    assert encode(scored(pieces), "") == ["<s>"]


@pytest.mark.parametrize("prefix, shown", [(True, "a é"), (False, " a é")])
def test_bytes_become_characters_again(prefix, shown):
    tokenizer = gguf_tokenizer(scored(["▁a", "▁", "a"], add_space_prefix=prefix))
    token_ids = tokenizer.convert_tokens_to_ids(["▁a", "▁", "<0xC3>", "<0xA9>"])
    assert tokenizer.decode(token_ids) == shown
    assert tokenizer.decode([*token_ids, token_ids[-1]]) == shown.replace("é", "\ufffd" * 3)


# Files


def test_a_file_is_read_whole(tmp_path):
    path = write(tmp_path / "model.gguf", scored(["▁a", "▁", "a"]))
    assert load_tokenizer(path).encode("a a") == gguf_tokenizer(scored(["▁a", "▁", "a"])).encode("a a") == [1, 259, 259]


BPE, SPM = byte_level(VOCAB, MERGES, "qwen2", bos_token_id=0), scored(["▁"])
REFUSED = [
    (
        BPE,
        {"model": "bert"},
        "model='bert' is not supported; supported: gpt2 .*, llama .*; pass the Hugging Face folder",
    ),
    (BPE, {"model": "t5"}, "model='t5' is not supported"),
    (BPE, {"model": None}, "its metadata has no 'tokenizer.ggml.model'"),
    (
        BPE,
        {"pre": "of-mars"},
        "pre='of-mars' is not supported; supported: .*, llama-bpe, .*qwen2, .*pass the Hugging Face",
    ),
    (BPE, {"pre": 4}, "pre=4 is not of type str"),
    (BPE, {"tokens": None}, "no 'tokenizer.ggml.tokens'"),
    (BPE, {"tokens": ["a", "b", "a"]}, "tokens has 'a' twice"),
    (BPE, {"tokens": [1, 2]}, "tokens has 1, which is not of type str"),
    (BPE, {"token_type": [1]}, f"token_type has 1 entries for {len(VOCAB)} tokens"),
    (BPE, {"merges": None}, "no 'tokenizer.ggml.merges'"),
    (BPE, {"merges": ["ab"]}, "merges has 'ab', which is not two tokens"),
    (BPE, {"merges": ["a zzz"]}, "merges has 'a zzz', but 'a', 'zzz' and 'azzz' are not all tokens"),
    (BPE, {"eos_token_id": 99999}, f"eos_token_id=99999 is none of the {len(VOCAB)} tokens"),
    (BPE, {"add_bos_token": "yes"}, "add_bos_token='yes' is not of type bool"),
    (
        BPE,
        {"add_bos_token": True, "bos_token_id": None},
        "every text is to have a bos token, but it has no .*bos_token_id",
    ),
    (SPM, {"scores": None}, "no 'tokenizer.ggml.scores'"),
    (SPM, {"scores": [0.0]}, "scores has 1 entries for 260 tokens"),
]


@pytest.mark.parametrize("sound, change, said", REFUSED, ids=[", ".join(change) for _, change, _ in REFUSED])
def test_what_cannot_be_read_is_named_with_the_file_and_the_way_out(sound, change, said, tmp_path):
    changed = {key: value for key, value in (sound | keys(**change)).items() if value is not None}
    path = write(tmp_path / "model.gguf", changed)
    with pytest.raises(CheckpointError, match=f"{re.escape(str(path))}: .*{said}.*") as raised:
        load_tokenizer(path)
    assert "\n" not in str(raised.value)
