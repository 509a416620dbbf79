"""llama.cpp as a peer: the same random weights in its own file format, decoded by its own kernels. Built in chapter 14.

It is asked for through llama-cpp-python, which compiles it for this machine and comes with
`pip install 'minillm-book[compare]'`. Where it is missing, `bench decode` goes without.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from ..model.config import ModelConfig

MATRIX_TYPES = ("F32", "BF16", "Q8_0", "Q4_0")


def installed() -> bool:
    return importlib.util.find_spec("llama_cpp") is not None


def write_gguf(
    folder: Path, config: ModelConfig, kind: torch.dtype | str, path: Path, with_vocabulary: bool = False
) -> Path:
    """Write the Llama checkpoint in `folder` to `path`, all its matrices (the embedding and the head too) in float32,
    bfloat16, or one of MATRIX_TYPES, norms in float32.

    Without a vocabulary token ids go in and come out; llama.cpp's server needs one, of as many tokens as the model has.
    Raises ValueError for what is not a plain Llama, another
    `kind`, or rows that are not whole blocks.
    """
    import gguf
    from safetensors.torch import load_file

    name = {torch.float32: "F32", torch.bfloat16: "BF16"}.get(kind, kind)
    if name not in MATRIX_TYPES:
        raise ValueError(f"kind={kind!r} is not written; allowed: {', '.join(MATRIX_TYPES)}")
    kind = gguf.GGMLQuantizationType[name]
    if config.model_type != "llama" or config.qkv_bias or config.rope.type != "default":
        raise ValueError(f"model_type={config.model_type!r} with its settings is not written; only a plain Llama is")
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if config.hidden_size % block or config.intermediate_size % block:
        raise ValueError(
            f"hidden_size={config.hidden_size} and intermediate_size={config.intermediate_size} are not whole "
            f"blocks of {block}, which {kind.name} is written in"
        )
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    if with_vocabulary:
        _add_vocabulary(writer, folder)
    else:
        writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _pairs_side_by_side(tensor, config.head_dim)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if tensor.dim() == 1:
            writer.add_tensor(target, tensor.float().numpy())
        else:
            writer.add_tensor(target, gguf.quantize(tensor.float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer, folder: Path) -> None:
    """The byte-level BPE of the folder's tokenizer.json."""
    from gguf import TokenType

    told = json.loads((folder / "tokenizer.json").read_text())
    special = {one["id"] for one in told["added_tokens"] if one["special"]}
    by_id = {index: token for token, index in told["model"]["vocab"].items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id[index] for index in range(len(by_id))])
    writer.add_token_types([TokenType.CONTROL if index in special else TokenType.NORMAL for index in range(len(by_id))])
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in told["model"]["merges"]])
    config = json.loads((folder / "config.json").read_text())
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _pairs_side_by_side(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """llama.cpp rotates dimension 2i with 2i + 1, a Hugging Face checkpoint i with i + head_dim / 2."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).reshape(weight.shape)


class LlamaCpp:
    """A model loaded by llama.cpp, greedy, one sequence; calling it streams tokens for ever."""

    def __init__(self, path: Path, threads: int, max_tokens: int):
        import llama_cpp

        self.lib = llama_cpp
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p(0))
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}; is it a GGUF file of a model that it knows?")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = max_tokens, 512, 512
        params.n_threads = params.n_threads_batch = threads
        # In float32 the cache too, for the same tokens; otherwise the half precision that it takes by itself.
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32 if "float32" in path.name else llama_cpp.GGML_TYPE_F16
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def __call__(self, prompt: list[int]) -> Iterator[int]:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        tokens = prompt
        while True:
            array = (self.lib.llama_token * len(tokens))(*tokens)
            if status := self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(array, len(tokens))):
                raise RuntimeError(f"llama_decode failed with status {status} on {len(tokens)} tokens")
            logits = np.ctypeslib.as_array(self.lib.llama_get_logits_ith(self.context, -1), (self.vocab_size,))
            tokens = [int(logits.argmax())]
            yield tokens[0]

    def close(self) -> None:
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)
