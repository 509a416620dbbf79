"""Token healing in the engine: a prompt that is cut inside of a word goes on as if it had not been cut."""

from __future__ import annotations

import pytest

from minillm import LLM, SamplingParams

STORY = "Once upon a time there was a little hedgehog named Finn."
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tinyworld", device="cpu", dtype="float32", num_kv_blocks=256, block_size=4)


def test_a_cut_word_goes_on_as_the_model_knows_it(llm):
    """All cuts of a text in one batch, with and without healing."""
    tokenizer = llm.get_tokenizer()
    cuts = [cut for cut in range(12, len(STORY)) if STORY[cut - 1].isalpha() and STORY[cut].isalpha()]
    outs = {
        heal: llm.generate([{"prompt": STORY[:cut], "heal": heal} for cut in cuts], GREEDY, use_tqdm=False)
        for heal in (False, True)
    }
    completed = {
        heal: sum(out.outputs[0].text.startswith(STORY[cut:].split()[0].strip(".")) for cut, out in zip(cuts, found))
        for heal, found in outs.items()
    }
    assert completed[True] > completed[False]
    for cut, out in zip(cuts, outs[True]):
        decoded = tokenizer.decode([*out.prompt_token_ids, *out.outputs[0].token_ids], skip_special_tokens=True)
        assert out.prompt == STORY[:cut] and decoded == STORY[:cut] + out.outputs[0].text
    [out] = llm.generate({"prompt": "Once upon a ti", "heal": True}, GREEDY, use_tqdm=False)
    assert out.outputs[0].text.startswith("me there was")
    assert tokenizer.decode(out.prompt_token_ids, skip_special_tokens=True) == "Once upon a"


def test_samples_streams_and_stop_strings_show_only_what_is_new(llm):
    prompt = {"prompt": STORY[:36], "heal": True}  # "... little he"
    params = SamplingParams(temperature=1.5, seed=3, n=4, max_tokens=10, ignore_eos=True)
    [whole] = llm.generate(prompt, params, use_tqdm=False)
    for sample in whole.outputs:
        written = llm.get_tokenizer().decode(whole.prompt_token_ids + sample.token_ids, skip_special_tokens=True)
        assert written.startswith(STORY[:36]) and written == STORY[:36] + sample.text
    alone = SamplingParams(temperature=1.5, seed=3, max_tokens=10, ignore_eos=True)
    assert "".join(delta.text for delta in llm.stream(prompt, alone)) == whole.outputs[0].text
    stop = SamplingParams(temperature=0.0, max_tokens=20, stop=["he", " named"])  # "he" is of the prompt, not met again
    [out] = llm.generate({"prompt": "A little he", "heal": True}, stop, use_tqdm=False)
    [free] = llm.generate({"prompt": "A little he", "heal": True}, GREEDY, use_tqdm=False)
    assert free.outputs[0].text.startswith(out.outputs[0].text) and "he" not in out.outputs[0].text


def test_a_prompt_that_no_token_continues_is_left_as_it_is(llm):
    for prompt in ("Hello<|user|>", "x"):
        plain, healed = (
            llm.generate({"prompt": prompt, "heal": heal}, GREEDY, use_tqdm=False)[0] for heal in (False, True)
        )
        assert healed.prompt_token_ids == plain.prompt_token_ids or prompt == "x"
    [cut] = llm.generate({"prompt": "There was a hedgeho", "heal": True}, SamplingParams(max_tokens=1), use_tqdm=False)
    assert len(cut.outputs[0].token_ids) == 1


@pytest.mark.parametrize(
    "prompt, params, words",
    [
        ({"prompt": "ab", "heal": 1}, {}, "heal=1 is not allowed"),
        ({"prompt": "ab", "heal": True}, {"structured_outputs": {"choice": ["a"]}}, "heal and structured_outputs"),
        ({"prompt": "ab", "heal": True}, {"bad_words": ["b"]}, "heal and bad_words"),
        ({"prompt": "ab", "heal": True}, {"prompt_logprobs": 0}, "heal and prompt_logprobs"),
    ],
    ids=str,
)
def test_what_cannot_be_healed_is_refused(llm, prompt, params, words):
    with pytest.raises((ValueError, TypeError), match=words):
        llm.generate(["fine", prompt], SamplingParams(**params), use_tqdm=False)
    assert not llm.engine.has_unfinished
