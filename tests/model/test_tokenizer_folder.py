"""A folder's tokenizer.json is read as written; a damaged one is named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors

from minillm.model.checkpoint import CheckpointError, load_tokenizer
from tests.helpers.grammar_cases import sentencepiece_tokenizer
from tests.helpers.tiny import byte_tokenizer, seeded

SPACES = normalizers.Replace(" ", "▁")
FRAME = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
TEXTS = st.text(st.sampled_from("a bnme:é name 12 \n") | st.characters(codec="utf-8"), max_size=30)


def save(folder: Path, tokenizer: Tokenizer, **config) -> Path:
    """A Llama's folder, as far as its tokenizer goes."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    named = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | config))
    return folder


def changed(**parts) -> Tokenizer:
    """Llama 2's kind of tokenizer with other parts."""
    tokenizer = Tokenizer.from_str(sentencepiece_tokenizer().backend_tokenizer.to_str())
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def written(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


PARTS = {
    "as in Llama 2": {},
    "a normalizer": {"normalizer": normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), SPACES])},
    "no prefix": {"normalizer": SPACES},
    "a pre-tokenizer": {"pre_tokenizer": pre_tokenizers.Split(Regex(r"\d|[^\d]+"), "isolated")},
    "a post-processor": {"post_processor": FRAME},
    "a decoder": {"decoder": decoders.Sequence([decoders.Fuse(), decoders.Strip("a", 1, 0)])},
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_tokens_and_text_are_those_of_the_file(parts, tmp_path):
    folder = save(tmp_path, changed(**parts))
    ours, theirs = load_tokenizer(folder), written(folder)

    @seeded
    @given(TEXTS)
    def equal(text):
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids
        token_ids = theirs.encode(text).ids
        assert ours.backend_tokenizer.decode(token_ids) == theirs.decode(token_ids)

    equal()
    assert json.loads(ours.backend_tokenizer.to_str())["model"] == json.loads(theirs.to_str())["model"]


def test_added_tokens_are_those_of_the_file(tmp_path):
    """tokenizer_config.json repeats them, and may say something else of one."""
    eager = AddedToken("<tool>", lstrip=True, rstrip=True, special=True).__getstate__()
    tokenizer = changed()
    folder = save(tmp_path, tokenizer, added_tokens_decoder={str(tokenizer.token_to_id("<tool>")): eager})
    for text in ("a <tool> name", " <tool>a"):
        assert load_tokenizer(folder).encode(text) == written(folder).encode(text).ids


def test_what_a_text_begins_with_and_the_chat_template_come_from_the_configuration(tmp_path):
    template = "{{ bos_token }}{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
    tokenizer = load_tokenizer(save(tmp_path, changed(), chat_template=template, pad_token="<unk>"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    chat = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<s>[a]"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}")
    assert load_tokenizer(tmp_path).apply_chat_template(chat, tokenize=False) == "</s>"


def test_a_limit_of_length_that_training_left_in_the_file_cuts_no_prompt(tmp_path):
    tokenizer = changed()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=40)
    ours = load_tokenizer(save(tmp_path, tokenizer))
    assert ours.encode("name name name") == changed().encode("name name name").ids


def test_special_tokens_may_be_named_in_a_file_of_their_own(tmp_path):
    folder = save(tmp_path, changed())
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


def test_a_folder_of_vocabulary_and_merges_still_loads(tmp_path):
    model = json.loads(byte_tokenizer().backend_tokenizer.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, model["merges"])]))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    text = "the cat sat on the mat"
    assert load_tokenizer(tmp_path).encode(text) == byte_tokenizer().encode(text, add_special_tokens=False)


# Damaged files


def without(text: str, *keys: str) -> str:
    """JSON without what stands at keys."""
    whole = part = json.loads(text)
    for key in keys[:-1]:
        part = part[key]
    del part[keys[-1]]
    return json.dumps(whole)


FRAMED = changed(post_processor=FRAME)
DAMAGED = {
    "cut off": ("tokenizer.json", lambda text: text[: len(text) // 2], "tokenizer.json cannot be read"),
    "empty": ("tokenizer.json", lambda text: "", "tokenizer.json has 0 bytes"),
    "no object": ("tokenizer.json", lambda text: "[1, 2]", "tokenizer.json cannot be read"),
    "no model": ("tokenizer.json", lambda text: without(text, "model"), "tokenizer.json cannot be read"),
    "a wrong type": (
        "tokenizer.json",
        lambda text: text.replace('"merges"', '"vocab"'),
        "tokenizer.json cannot be read",
    ),
    "no special token": (
        "tokenizer.json",
        lambda text: without(text, "post_processor", "special_tokens", "<s>"),
        "no tokenizer could be loaded from .*tokenizer.json",
    ),
    "settings cut off": ("tokenizer_config.json", lambda text: text[:-9], "tokenizer_config.json is not valid JSON"),
    "settings of no object": (
        "tokenizer_config.json",
        lambda text: "null",
        "tokenizer_config.json holds None",
    ),
    "a wrong setting": (
        "tokenizer_config.json",
        lambda text: json.dumps(json.loads(text) | {"eos_token": 5}),
        "no tokenizer could be loaded from .*tokenizer.json and tokenizer_config.json",
    ),
    "a wrong template": (
        "tokenizer_config.json",
        lambda text: json.dumps(json.loads(text) | {"chat_template": 5}),
        "tokenizer_config.json: chat_template=5 is not a text",
    ),
    "a map cut off": (
        "special_tokens_map.json",
        lambda text: '{"bos_token":',
        "special_tokens_map.json is not valid JSON",
    ),
}


@pytest.mark.parametrize("name, damage, said", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named_with_the_way_out(name, damage, said, tmp_path):
    folder = save(tmp_path, FRAMED)
    file = folder / name
    file.write_text(damage(file.read_text() if file.exists() else ""))
    with pytest.raises(
        CheckpointError, match=f"{re.escape(str(folder))}.*; fetch (the file|it) again, or write"
    ) as raised:
        load_tokenizer(folder)
    assert re.search(said, str(raised.value)) and "\n" not in str(raised.value)
