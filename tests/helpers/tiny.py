"""A tiny random Llama with a byte-level tokenizer, in a folder as transformers writes it."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.helpers.model_zoo import make_model

TIMES = int(os.environ.get("MINILLM_EXAMPLES", "1"))


def examples(count: int) -> settings:
    """A property that fails here fails everywhere, and no example is refused for being slow. With MINILLM_EXAMPLES=20
    in the environment every property gets 20 times as many examples, others each time."""
    return settings(derandomize=TIMES == 1, deadline=None, max_examples=count * TIMES, database=None)


seeded = examples(100)

BEGIN, END, USER = "<|begin|>", "<|end|>", "<|user|>"
TEXT = "the cat sat on the mat, then the naïve cat ate 10 crêpes 😀 😃 👍🏽 日本語 日本 मनीष — «так» " * 4
VOCAB_SIZE = 300
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|user|>{{ message['role'] }}: {{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant:{% endif %}"
)


@lru_cache(maxsize=1)
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: every byte is a token, and some merges cut characters in the middle."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BEGIN, END, USER],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        additional_special_tokens=[USER],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_tiny_llama(folder: Path, seed: int = 0, **settings) -> PreTrainedModel:
    """Write model and tokenizer into `folder`, return the transformers model."""
    settings = (
        dict(
            model_type="llama",
            vocab_size=VOCAB_SIZE,
            num_hidden_layers=2,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
        | settings
    )
    model = make_model(seed, **settings)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model
