"""The bundled tokenizer: byte-level BPE learned from the corpus, every digit a token of its own.
Built in chapter 00."""

from __future__ import annotations

from itertools import islice

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from . import corpus

BEGIN, END, USER, ASSISTANT = "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def learn(vocab_size: int = 1024, num_documents: int = 20_000, seed: int = corpus.TRAIN_SEED) -> Tokenizer:
    """Learn the merges from the first `num_documents` of the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d.text for d in islice(corpus.documents(seed), num_documents)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer


def wrap(tokenizer: Tokenizer, context: int) -> PreTrainedTokenizerFast:
    """The same tokenizer as `transformers` loads it, with its special tokens and chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
