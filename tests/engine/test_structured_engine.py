"""Structured output in the engine: only what the grammar allows,
whatever else is in the batch and whatever road it took."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from minillm import LLM, SamplingParams, StructuredOutputsParams
from tests.helpers.tiny import byte_tokenizer, save_tiny_llama

PROMPTS = [[5, 6, 7, 8, 5, 6], [20, 21, 22], [9] * 12]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 7, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["é", "no", 3, None]}, "minItems": 1, "maxItems": 3},
        "friend": {"$ref": "#/$defs/pet"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "$defs": {
        "pet": {
            "type": "object",
            "properties": {"legs": {"enum": [2, 4]}},
            "required": ["legs"],
            "additionalProperties": False,
        }
    },
}
REGEXES = [
    r"-?(0|[1-9][0-9]{0,3})(\.[0-9]{1,2})?",
    r"(cat|dog)s?( and (cat|dog)s?){1,3}",
    r"[а-я😀-😇]{2,5}!",
    r"\d{2}:\d{2}",
]
KINDS = {"json": dict(json=PERSON), "choice": dict(choice=["red", "reddish", "日本"])} | {
    f"regex {i}": dict(regex=r) for i, r in enumerate(REGEXES)
}
KINDS["marked"] = dict(regex=REGEXES[0], after=" the", thinking_token_budget=8)  # free, then the marker, then a number


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    save_tiny_llama(path / "target", eos_token_id=1)
    save_tiny_llama(path / "draft", seed=3, eos_token_id=1)
    return path


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return make(folder)


def make(folder, **settings) -> LLM:
    return LLM(folder / "target", device="cpu", dtype="float32", **settings)


def say(llm: LLM, params, prompts=PROMPTS) -> list:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    llm.engine.scheduler.check_integrity()
    return outputs


def params_of(kind: str, seed: int = 0, jump: bool = False, **settings) -> SamplingParams:
    structured = KINDS[kind] | {"jump_forward": jump}
    return SamplingParams(**dict(temperature=1.0, seed=seed, max_tokens=120) | settings, structured_outputs=structured)


def check(kind: str, text: str) -> None:
    """Raises unless `text` is a whole one of its kind."""
    constraint = KINDS[kind]
    if "after" in constraint:
        text = text.partition(constraint["after"])[2]
    if "json" in constraint:
        jsonschema.validate(json.loads(text), constraint["json"])
    elif "choice" in constraint:
        assert text in constraint["choice"]
    else:
        assert re.fullmatch(constraint["regex"], text), text


def tokens(outputs) -> list:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_stops_is_valid_and_one_that_is_cut_off_says_so(llm, kind):
    """Under random weights at temperature 1."""
    stopped = 0
    for seed in range(4):
        for output in say(llm, params_of(kind, seed, n=3)):
            for sample in output.outputs:
                assert sample.finish_reason in ("stop", "length")
                if sample.finish_reason == "stop":
                    check(kind, sample.text)
                    stopped += 1
                else:
                    assert len(sample.token_ids) == 120
    assert stopped > 8
    [cut] = say(llm, params_of(kind, max_tokens=1), PROMPTS[:1])
    if cut.outputs[0].finish_reason == "stop":
        check(kind, cut.outputs[0].text)


def test_requests_with_and_without_a_grammar_share_a_batch(llm):
    params = [
        params_of("json", 1),
        SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True),
        params_of("regex 1", 1, temperature=0.0),
    ]
    together = say(llm, params)
    alone = [say(llm, [one], [prompt])[0] for one, prompt in zip(params, PROMPTS)]
    assert tokens(together) == tokens(alone)
    check("regex 1", together[2].outputs[0].text)


SETTINGS = {
    "few blocks": dict(num_kv_blocks=24, block_size=4),
    "swapped": dict(num_kv_blocks=24, block_size=4, preemption_mode="swap", host_kv_bytes=10**6),
    "chunks": dict(max_num_batched_tokens=5),
    "ahead": dict(async_scheduling=True),
    "ngram": dict(speculative_config={"method": "ngram", "prompt_lookup_min": 1}),
    "draft": dict(speculative_config="draft"),
    "perfect draft": dict(speculative_config="target"),
    "ahead, draft, few": dict(speculative_config="draft", async_scheduling=True, num_kv_blocks=24, block_size=4),
}


ROADS = [("json", {}), ("regex 1", dict(temperature=0.0)), ("regex 2", dict(n=2)),
         ("json", dict(frequency_penalty=0.5, logprobs=1)), ("json", dict(jump=True)),
         ("regex 1", dict(jump=True, n=2)), ("regex 3", dict(jump=True, temperature=0.0)),
         ("marked", {}), ("marked", dict(jump=True, n=2))]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_road_changes_no_token(folder, llm, settings):
    settings = dict(SETTINGS[settings])
    if (name := settings.get("speculative_config")) in ("draft", "target"):
        settings["speculative_config"] = {"method": "draft_model", "model": folder / name}
    other = make(folder, **settings)
    for kind, more in ROADS:
        params = [params_of(kind, seed, **more) for seed in range(len(PROMPTS))]
        plain, changed = say(llm, params), say(other, params)
        assert tokens(plain) == tokens(changed)
        assert [[s.finish_reason for s in o.outputs] for o in plain] == [
            [s.finish_reason for s in o.outputs] for o in changed
        ]
    if "speculative_config" in settings:
        assert other.engine.speculation.metrics.num_accepted_tokens > 0


def test_unseeded_requests_with_a_draft_model_obey_too(folder):
    llm = make(folder, speculative_config={"method": "draft_model", "model": folder / "draft"})
    for output in say(llm, params_of("regex 1", None), [PROMPTS[0]] * 12):
        if output.outputs[0].finish_reason == "stop":
            check("regex 1", output.outputs[0].text)
    assert llm.engine.speculation.metrics.num_draft_tokens > 0


def test_a_draft_model_guesses_inside_the_grammar(folder):
    """The target as its own draft is always right, since the draft obeys the grammar too."""
    llm = make(folder, speculative_config={"method": "draft_model", "model": folder / "target"})
    for params in (params_of("json", 1), params_of("json", None), params_of("regex 1", temperature=0.0)):
        say(llm, params)
    assert llm.engine.speculation.metrics.num_accepted_tokens == llm.engine.speculation.metrics.num_draft_tokens > 30


def test_what_is_forced_is_jumped_over(folder, llm):
    forced = {"type": "object",
              "properties": {"a_long_name": {"enum": [1, 2]}, "another_long_name": {"enum": [True, False]}},
              "required": ["a_long_name", "another_long_name"], "additionalProperties": False}  # fmt: skip
    for speculative_config in (None, {"method": "ngram", "prompt_lookup_min": 1}):
        other = make(folder, speculative_config=speculative_config)
        for seed in range(3):
            steps = []
            for jump_forward in (False, True):
                before = other.engine.num_steps
                structured = StructuredOutputsParams(json=forced, jump_forward=jump_forward)
                [output] = say(
                    other,
                    SamplingParams(temperature=1.0, seed=seed, max_tokens=200, structured_outputs=structured),
                    PROMPTS[:1],
                )
                jsonschema.validate(json.loads(output.outputs[0].text), forced)
                assert output.outputs[0].finish_reason == "stop"
                steps.append(other.engine.num_steps - before)
            assert steps[1] <= 8 and 2 * steps[1] < steps[0]


def test_jumps_are_made_inside_an_accepted_run_too(folder, llm):
    """Else a guess would spell what is forced in other tokens than the jump."""
    regex = r"(the cat|the mat|that cat) (sat|ate) on the (cat|mat), then ate 10 (crêpes|cats)"
    guessing = make(folder, speculative_config={"method": "draft_model", "model": folder / "target"})
    params = [
        SamplingParams(
            temperature=1.5, seed=seed, max_tokens=60, structured_outputs=dict(regex=regex, jump_forward=True)
        )
        for seed in range(12)
    ]
    plain, changed = (say(one, params, [PROMPTS[0]] * 12) for one in (llm, guessing))
    assert tokens(plain) == tokens(changed)
    assert guessing.engine.speculation.metrics.num_accepted_tokens > 20


def test_a_jump_ends_where_the_limit_is_and_streams(llm):
    structured = StructuredOutputsParams(choice=["abcdefghijklmnop", "abcdefghijklmnoq"], jump_forward=True)
    [output] = say(llm, SamplingParams(max_tokens=3, structured_outputs=structured), PROMPTS[:1])
    assert len(output.outputs[0].token_ids) == 3 and output.outputs[0].finish_reason == "length"
    params = SamplingParams(max_tokens=40, structured_outputs=structured, stop="mno")
    assert "".join(delta.text for delta in llm.stream({"prompt_token_ids": PROMPTS[0]}, params)) == "abcdefghijkl"
    [output] = say(
        llm, SamplingParams(temperature=1.0, seed=1, n=5, max_tokens=40, structured_outputs=structured), PROMPTS[:1]
    )
    assert {sample.text for sample in output.outputs} == set(structured.choice)
    with pytest.raises(ValueError, match=r"logprobs=1.*jump_forward"):
        SamplingParams(logprobs=1, structured_outputs=structured)


def test_an_end_is_allowed_where_nothing_else_is(llm):
    params = SamplingParams(temperature=0.0, min_tokens=50, max_tokens=60, structured_outputs={"choice": ["ab", "cd"]})
    [output] = say(llm, params, PROMPTS[:1])
    assert output.outputs[0].text in ("ab", "cd") and output.outputs[0].finish_reason == "stop"


def test_penalties_and_bias_act_before_the_mask(llm):
    token_id = byte_tokenizer().convert_tokens_to_ids("c")
    params = SamplingParams(
        temperature=0.0, max_tokens=9, logit_bias={token_id: 100.0}, structured_outputs={"choice": ["ab", "cd", "xy"]}
    )
    assert say(llm, params, PROMPTS[:1])[0].outputs[0].text == "cd"
    params = SamplingParams(
        temperature=0.0, max_tokens=9, logit_bias={token_id: 100.0}, structured_outputs={"choice": ["ab", "xy"]}
    )
    assert say(llm, params, PROMPTS[:1])[0].outputs[0].text in ("ab", "xy")


def test_what_cannot_be_is_refused_before_anything_starts(llm):
    good = SamplingParams(max_tokens=5)
    for constraint, says in ((dict(json={"type": "integer", "minimum": 3, "maximum": 1}), "json"),
                             (dict(regex="a(?=b)"), "regex"),
                             (dict(grammar="start: undefined_rule"), "grammar")):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            say(llm, [good, SamplingParams(structured_outputs=constraint), good])
        assert not llm.engine.has_unfinished


def test_beams_and_streams_of_others_go_on(llm):
    stream = llm.stream({"prompt_token_ids": PROMPTS[1]}, params_of("json", 2))
    first = [next(stream) for _ in range(3)]
    beams = llm.beam_search([{"prompt_token_ids": PROMPTS[0]}], beam_width=2, max_tokens=5)
    text = "".join(delta.text for delta in [*first, *stream])
    assert len(beams[0].outputs) == 2
    [whole] = say(llm, params_of("json", 2), PROMPTS[1:2])
    assert text == whole.outputs[0].text


@pytest.mark.parametrize("prompt", [[60, 130], [5, 60, 262], [7, 60, 276], [130]], ids=str)
def test_the_text_begins_where_the_prompt_ended_whatever_it_ended_in(llm, prompt):
    """A prompt may end in half a character, which a grammar never completes."""
    assert byte_tokenizer().decode(prompt).endswith("\ufffd")
    for choices in (["yes", "no"], ["émile", "日本"]):
        params = SamplingParams(temperature=0.0, max_tokens=20, structured_outputs={"choice": choices})
        [output] = say(llm, params, [prompt])
        assert output.outputs[0].text in choices
        assert (
            "".join(delta.text for delta in llm.stream({"prompt_token_ids": prompt}, params)) == output.outputs[0].text
        )
