"""A random model, adapters of many kinds for it, and what PEFT says with each."""

from __future__ import annotations

from pathlib import Path

from minillm import LLM, LoRARequest, SamplingParams
from minillm.book.roads.pickled import pickle_steps
from tests.helpers.adapters import peft_tokens, save_adapter
from tests.helpers.model_zoo import make_model
from tests.helpers.tiny import VOCAB_SIZE, byte_tokenizer

MAX_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
PROMPTS = [[3 + i * 7 % 90 for i in range(32)], [5], [11, 12, 13, 14], [*range(20, 60)]]
QUIET = {"use_tqdm": False}
# Ranks, targets and scalings; key and value heads are fewer than those of queries.
KINDS: dict[str, dict] = {
    "all": dict(r=4),
    "q and v": dict(r=8, targets=["q_proj", "v_proj"]),
    "rslora": dict(r=16, targets="all-linear", use_rslora=True),
    "patterns": dict(
        r=2, targets=r".*\.(o|gate|up|down)_proj", rank_pattern={"up_proj": 6, r"layers\.0\.self_attn\.o_proj": 3},
        alpha_pattern={"layers.1.mlp.down_proj": 9},
    ),
    "some layers": dict(r=64, targets=["k_proj", "down_proj"], layers_to_transform=[1]),
}  # fmt: skip
EVERYONE = [None, *KINDS]


class World:
    """A random model, its adapters, and what PEFT says with each."""

    def __init__(self, folder: Path):
        self.model = folder / "model"
        make = dict(vocab_size=VOCAB_SIZE, num_hidden_layers=2, head_dim=16, eos_token_id=VOCAB_SIZE - 1)
        make_model(1, model_type="llama", **make).save_pretrained(self.model)
        byte_tokenizer().save_pretrained(self.model)
        self.folders = {
            name: save_adapter(self.model, folder / name, seed, **kind)
            for seed, (name, kind) in enumerate(KINDS.items())
        }
        self.said = {name: peft_tokens(self.model, path, PROMPTS, MAX_TOKENS) for name, path in self.folders.items()}
        self.said[None] = peft_tokens(self.model, None, PROMPTS, MAX_TOKENS)
        assert len({str(said) for said in self.said.values()}) == len(self.said), "no adapter passes for another"

    def request(self, name: str | None) -> LoRARequest | None:
        return None if name is None else LoRARequest(name, 1 + list(KINDS).index(name), str(self.folders[name]))

    def llm(self, **settings) -> LLM:
        common = dict(dtype="float32", device="cpu", enable_lora=True, max_lora_rank=64, block_size=4)
        llm = LLM(self.model, **common | settings)
        pickle_steps(llm.engine)
        return llm

    def check(self, llm: LLM, names: list[str | None], **options) -> list:
        """Every prompt with every one of these adapters in one call."""
        asked = [(name, index) for name in names for index in range(len(PROMPTS))]
        prompts = [{"prompt_token_ids": PROMPTS[index]} for _, index in asked]
        requests = [self.request(name) for name, _ in asked]
        outputs = llm.generate(prompts, GREEDY, lora_request=requests, **QUIET, **options)
        for (name, index), output in zip(asked, outputs):
            assert output.outputs[0].token_ids == self.said[name][index], (name, index)
            assert output.lora_request == output.outputs[0].lora_request == self.request(name)
        return outputs
