"""What `Logprob.decoded_token` calls a token: its text, and of a character in several tokens all of it at the last
one."""

from __future__ import annotations

import pytest

from minillm import LLM, SamplingParams
from minillm.engine.detokenizer import REPLACEMENT, token_text
from tests.helpers.grammar_cases import sentencepiece_tokenizer
from tests.helpers.tiny import byte_tokenizer, save_tiny_llama


def texts(tokenizer, token_ids: list[int]) -> list[str]:
    decode = tokenizer.backend_tokenizer.decode
    return [
        token_text(lambda ids: decode(ids, skip_special_tokens=False), one, token_ids[:i])
        for i, one in enumerate(token_ids)
    ]


def test_the_last_token_of_a_character_has_all_of_it():
    encode = byte_tokenizer().encode
    assert texts(byte_tokenizer(), encode("a🦜b", add_special_tokens=False)) == ["a", "", "", "🦜", "b"]
    assert "".join(texts(byte_tokenizer(), encode("the 🦜 é 😀 так", add_special_tokens=False))) == "the 🦜 é 😀 так"


def test_byte_fallback_tokens_have_the_character_without_what_was_before():
    tokenizer = sentencepiece_tokenizer()
    token_ids = tokenizer.convert_tokens_to_ids(["a", "<0xC3>", "<0xBC>", "a"])
    assert texts(tokenizer, token_ids) == ["a", "", "ü", "a"]


def test_only_the_end_of_a_token_is_looked_at():
    """As in vLLM: a token that completes a character and goes on keeps the replacement at its beginning."""
    one, *_, last = byte_tokenizer().encode("日本", add_special_tokens=False)
    assert texts(byte_tokenizer(), [one, last]) == ["", "\ufffd本"]


def test_bytes_that_never_become_a_character_have_no_text():
    half = byte_tokenizer().encode("🦜", add_special_tokens=False)[1]
    assert texts(byte_tokenizer(), [half] * 3) == ["", "", ""]


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    folder = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_llama(folder)
    return LLM(folder, device="cpu", num_kv_blocks=32)


def test_outputs_and_prompts_are_named_by_their_own_tokens_alone(llm):
    parrot = byte_tokenizer().encode("🦜", add_special_tokens=False)
    for forced in parrot[-1], parrot[0]:
        params = SamplingParams(
            temperature=0.0, max_tokens=3, logprobs=2, prompt_logprobs=0, logit_bias={forced: 100}, ignore_eos=True
        )
        [output] = llm.generate({"prompt_token_ids": [40, *parrot]}, params, use_tqdm=False)
        named = [row[token].decoded_token for row, token in zip(output.prompt_logprobs[1:], parrot)]
        assert named == ["", "", "🦜"]
        sample = output.outputs[0]
        # A character that the prompt begins is not looked for in the output, and the other way round.
        assert [row[forced].decoded_token for row in sample.logprobs] == ["", "", ""]
        assert all(REPLACEMENT not in entry.decoded_token[-1:] for row in sample.logprobs for entry in row.values())
