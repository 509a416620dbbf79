"""The bundled adapters in the engine: two voices and the model itself in one batch, each heard where asked for."""

from __future__ import annotations

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from minillm import LLM, LoRARequest, SamplingParams, zoo
from minillm.kernels import native
from minillm.zoo import corpus, voices

ADAPTERS = {
    "": None,
    "pirate": LoRARequest("pirate", 1, "tinyworld-pirate"),
    "news": LoRARequest("news", 2, "tinyworld-news"),
}
OPENINGS = [voices.cut_opening(document.text)[0] for document in corpus.held_out("story", 12)]
QUESTIONS = [document.questions[0][0] for document in corpus.held_out("arithmetic", 4)]
GREEDY = SamplingParams(temperature=0, max_tokens=48)


@pytest.fixture(scope="module")
def llm():
    return LLM("tinyworld", dtype="float32", enable_lora=True, max_loras=2, max_lora_rank=16)


@pytest.fixture(scope="module")
def said(llm):
    """What every voice, and none, says to every prompt, all in one batch: (voice, prompt) -> output."""
    asked = [(voice, prompt) for prompt in OPENINGS + QUESTIONS for voice in ADAPTERS]
    adapters = [ADAPTERS[voice] for voice, _ in asked]
    outputs = llm.generate([prompt for _, prompt in asked], GREEDY, use_tqdm=False, lora_request=adapters)
    return {key: output.outputs[0] for key, output in zip(asked, outputs)}


def test_each_request_is_answered_in_the_voice_that_it_asks_for(said):
    for (voice, prompt), output in said.items():
        if prompt in OPENINGS:
            heard = [name for name, one in voices.VOICES.items() if one.heard(output.text)]
            assert heard == [voice] * bool(voice), output.text


def test_requests_without_an_adapter_are_as_they_are_in_an_engine_without_any(said):
    plain = LLM("tinyworld", dtype="float32").generate(OPENINGS + QUESTIONS, GREEDY, use_tqdm=False)
    assert [said["", output.prompt].token_ids for output in plain] == [output.outputs[0].token_ids for output in plain]


def test_a_mixed_batch_says_what_peft_says(said, llm):
    """Each token is the most likely one for PEFT behind those before it."""
    base = AutoModelForCausalLM.from_pretrained(zoo.bundled()["tinyworld"], dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, zoo.bundled_adapters()["tinyworld-pirate"], "pirate")
    model.load_adapter(zoo.bundled_adapters()["tinyworld-news"], "news")
    for voice in voices.VOICES:
        model.set_adapter(voice)
        for prompt in OPENINGS + QUESTIONS:
            ids, made = llm.get_tokenizer().encode(prompt), list(said[voice, prompt].token_ids)
            with torch.inference_mode():
                logits = model(torch.tensor([ids + made[:-1]])).logits[0, len(ids) - 1 :]
            assert logits.argmax(-1).tolist() == made, prompt


@pytest.mark.skipif(native.library() is None, reason="no C compiler with OpenMP here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_beside_a_request_change_no_bit_of_its_probabilities(dtype):
    """On a CPU: of a request without an adapter, whose steps alone take whole layers, and of one with its own."""
    llm = LLM("tinyworld", dtype=dtype, enable_lora=True, max_loras=2, max_lora_rank=16, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, logprobs=1)
    text, other = corpus.held_out("story", 2)[0].text, corpus.held_out("story", 2)[1].text

    def probabilities(*adapters) -> list[float]:
        """Of the first request: every token of its prompt, and the tokens after it."""
        prompts = [text, other, other][: len(adapters)]
        output = llm.generate(prompts, params, use_tqdm=False, lora_request=list(adapters))[0]
        made = output.prompt_logprobs[1:] + output.outputs[0].logprobs
        return [one.logprob for place in made for one in place.values()]

    pirate, news = ADAPTERS["pirate"], ADAPTERS["news"]
    for mine, others in ((None, [pirate, news]), (pirate, [None, news])):
        assert probabilities(mine, *others) == probabilities(mine)
    assert probabilities(pirate) != probabilities(None)
