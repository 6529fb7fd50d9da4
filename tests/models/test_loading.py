"""What stands between a folder and an engine: nothing is left out in silence, and no code of a folder is run."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from specdec_kernels import hf
from specdec_kernels.engine import Draft, Eagle, Eagle3, Engine, Ngram, RequestOutput, SamplingParams, Standalone
from specdec_kernels.models.weights.checkpoint import kind_of, load_tensors, tensor_names
from specdec_kernels.tiny import tiny_model
from support.hybrid_cases import hybrid_module
from support.random_checkpoints import random_prompts, save_random_model
from support.tiny_checkpoint import tokenizer

EIGHT = SamplingParams(max_new_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("models") / "plain", "llama")


def changed(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], object] | None = None, **config: Any) -> Path:
    """Copy a folder with other tensors or config entries."""
    shutil.copytree(folder, to)
    text = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(text | config))
    if change is not None:
        tensors = load_file(to / "model.safetensors")
        change(tensors)
        save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def refusal(model: Any, **options: Any) -> str:
    with pytest.raises(ValueError) as error:
        Engine(model, max_len=64, device="cpu", **options)
    return str(error.value)


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_a_module_that_was_made_in_inference_mode_can_be_cast(folder: Path) -> None:
    with torch.inference_mode():
        module = loaded(folder)
    texts, prompts = [], random_prompts(2)
    for model in (folder, module):
        with Engine(model, max_len=64, device="cpu", dtype=torch.bfloat16) as engine:
            texts.append([output.tokens for output in engine.generate(prompts, EIGHT)])
    assert texts[0] == texts[1]


# --- weights quantized in ways that are not read (test_quantized.py has those that are)


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "torchao (int8_weight_only)"),
        ({"bits": 4}, "a method without a name"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_quantized_folders_are_refused_before_weights_are_read(
    config: dict[str, Any], method: str, folder: Path, tmp_path: Path
) -> None:
    other = changed(folder, tmp_path / "x", quantization_config=config)
    (other / "model.safetensors").unlink()
    expected = (
        f"{other} is quantized by {method}, "
        "expected fp8, compressed-tensors, gptq, awq or weights of float32, float16 or bfloat16"
    )
    assert refusal(other) == f"model: {expected}"
    assert refusal(folder, draft=Standalone(other)) == f"draft model: {expected}"


class OtherLinear(torch.nn.Linear):
    """A product of something else's, as FP8Linear and the layers of PEFT are."""


class Wrapper(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = inner


def scaled(model: Any) -> None:
    linear = model.model.layers[1].mlp.up_proj
    linear.register_parameter("weight_scale", torch.nn.Parameter(torch.ones(1)))


def narrowed(model: Any) -> None:
    linear = model.model.layers[1].mlp.up_proj
    linear.weight = torch.nn.Parameter(linear.weight.data.to(torch.float8_e4m3fn), requires_grad=False)


def replaced(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj.__class__ = OtherLinear


def wrapped(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.q_proj = Wrapper(attention.q_proj)


def another_attention(model: Any) -> None:
    class Attention(type(model.model.layers[0].self_attn)):  # type: ignore[misc]
        pass

    model.model.layers[0].self_attn.__class__ = Attention


def parametrised(model: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)


def subclassed(model: Any) -> None:
    class Packed(torch.nn.Parameter):
        pass

    linear = model.lm_head
    linear.weight = Packed(linear.weight.data)


def left_out(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.to("meta")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (scaled, "model.layers.1.mlp.up_proj has weight_scale, expected a weight and a bias alone"),
        (
            narrowed,
            "model.layers.1.mlp.up_proj.weight is torch.float8_e4m3fn, "
            "expected one of torch.float32, torch.float16, torch.bfloat16",
        ),
        (
            replaced,
            f"model.layers.0.self_attn.q_proj is a {__name__}.OtherLinear, expected a plain torch.nn.Linear",
        ),
        (wrapped, f"model.layers.0.self_attn.q_proj is a {__name__}.Wrapper, expected a plain torch.nn.Linear"),
        (
            another_attention,
            f"model.layers.0.self_attn is a {__name__}.Attention, expected a module of transformers",
        ),
        (
            parametrised,
            "model.layers.0.mlp.up_proj is a torch.nn.utils.parametrize.ParametrizedLinear, "
            "expected a plain torch.nn.Linear",
        ),
        (subclassed, "lm_head.weight is a Packed, expected a plain torch.nn.Parameter"),
        (left_out, "model.layers.0.mlp.up_proj.weight is on no device, expected a weight that is loaded"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_modules_that_ours_would_not_repeat_are_refused(
    change: Callable[[Any], None], message: str, folder: Path
) -> None:
    """By the engine, as a target and as a draft, and by `hf.generate`."""
    model = loaded(folder)
    change(model)
    assert refusal(model) == f"model: {message}"
    assert refusal(folder, draft=Standalone(model)) == f"draft model: {message}"
    if change is not left_out:  # transformers itself does not begin with it
        with pytest.raises(ValueError) as error:
            model.generate(torch.tensor([[5]]), max_new_tokens=2, custom_generate=hf.generate)
        assert str(error.value) == f"model: {message}"


def test_a_model_that_something_wraps_is_refused(folder: Path) -> None:
    class PeftModelForCausalLM(torch.nn.Module):
        config = None

    assert refusal(PeftModelForCausalLM()) == (
        "model: it is a PeftModelForCausalLM, expected a language model of transformers (merge_and_unload() gives it)"
    )
    assert refusal(Wrapper(loaded(folder))) == "model: it is a Wrapper, expected a language model of transformers"


# --- whole folders


def test_tensors_must_be_all_there_and_no_others(folder: Path, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"], tensors["lm_head.weight"]
        tensors["model.layers.1.mlp.up_proj.weight_scale"] = torch.ones(1)

    other = changed(folder, tmp_path / "x", spoil)
    expected = (
        f"{other} lacks lm_head.weight, model.layers.1.mlp.up_proj.weight and "
        "has model.layers.1.mlp.up_proj.weight_scale, unknown to LlamaForCausalLM, "
        "expected every tensor of the model and no other"
    )
    assert refusal(other) == f"model: {expected}"
    assert refusal(folder, draft=Standalone(other)) == f"draft model: {expected}"

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[f"other.{name}"] = tensors.pop(name)

    message = refusal(changed(folder, tmp_path / "y", rename))
    assert (
        "lacks lm_head.weight, model.embed_tokens.weight, model.layers.0.input_layernorm.weight and 36 more" in message
    )

    def cut(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:5].clone()

    other = changed(folder, tmp_path / "z", cut)
    assert refusal(other) == (
        f"model: {other} has model.norm.weight of shape [5], expected [96], "
        "expected every tensor of the model and no other"
    )


def test_tensors_of_experts_must_be_all_there_and_fit_each_other(tmp_path: Path) -> None:
    whole, name = save_random_model(tmp_path / "model", "qwen3_moe"), "model.layers.2.mlp.experts.3.up_proj.weight"
    other = changed(whole, tmp_path / "x", lambda tensors: tensors.__delitem__(name))
    assert refusal(other) == f"model: {other} lacks {name}, expected every tensor of the model and no other"

    def cut(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][:5].clone()

    other, end = changed(whole, tmp_path / "y", cut), "expected every tensor of the model and no other"
    assert refusal(other) == f"model: {other} has {name} of shape [5, 96] (other experts: [64, 96]), {end}"


def test_integers_are_no_weights_of_a_folder_that_is_not_quantized(folder: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def quantize(tensors: dict[str, Tensor]) -> None:
        tensors[name] = (tensors[name] * 50).to(torch.int8)

    other = changed(folder, tmp_path / "x", quantize)
    assert refusal(other) == (
        f"model: {other} has {name} of I8, expected floats (its config names no way in which it is quantized)"
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_attention_heads": "6"}, "has num_attention_heads '6', expected an integer from 1 to 2147483647"),
        (
            {"num_hidden_layers": 10**20},
            "has num_hidden_layers 100000000000000000000, expected an integer from 1 to 1000",
        ),
        ({"attention_bias": "no"}, "has attention_bias 'no', expected bool"),
        (
            {"rope_parameters": {"rope_type": "x", "rope_theta": 1e4}},
            "has rope_parameters.rope_type 'x', expected a value that can be read (KeyError: 'x')",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "mscale": 1e20}},
            "has mscale 1e+20, expected a finite number below 2**63",
        ),
        ({"hidden_act": "sillu"}, "has hidden_act 'sillu', expected a value that can be read (KeyError: 'sillu')"),
        (
            {"intermediate_size": -3},
            "has intermediate_size -3, expected a value that can be read (RuntimeError: Trying ",
        ),
        ({"attention_dropout": float("nan")}, "has attention_dropout nan, expected a finite number"),
        (
            {"max_position_embeddings": 10**20},
            "has max_position_embeddings 100000000000000000000, expected an integer of 32 bits",
        ),
    ],
)
def test_configs_that_transformers_refuses_are_named(
    changes: dict[str, Any], reason: str, folder: Path, tmp_path: Path
) -> None:
    other = changed(folder, tmp_path / "x", **changes)
    assert refusal(other).startswith(f"model: {other} {reason}")
    (other / "config.json").write_text("[1]")
    assert refusal(other).startswith(f"model: {other} has a config that transformers refuses (TypeError: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": ["llama"]}, "model_type ['llama'], expected one that transformers knows (code that comes with a model is not run)"),
        ({"quantization_config": [1]}, "quantization_config [1], expected an object"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": [1]}},
         "a quantization_config that cannot be read (AttributeError: 'list' object has no attribute 'values'), expected one of compressed-tensors"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps 0.0, expected a number above 0, below 2**63"),
    ],
)  # fmt: skip
def test_config_entries_of_other_types_are_refused_by_name(
    changes: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    other = changed(folder, tmp_path / "x", **changes)
    assert refusal(other) == f"model: {other} has {message}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, "n_group 3, expected a divisor of the number of experts (8)"),
        ({"topk_group": 5}, "topk_group 5, expected 1 to n_group (4)"),
        ({"topk_group": 1}, "num_experts_per_tok 3, expected 1 to 2 (topk_group 1)"),
    ],
)
def test_groups_of_experts_that_no_row_can_select_from_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    sizes = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3} | changes
    AutoConfig.for_model("deepseek_v3", **sizes).save_pretrained(tmp_path)
    assert refusal(tmp_path) == f"model: {tmp_path} has {message}"


def test_config_of_a_hybrid_with_a_size_of_another_type_is_refused(tmp_path: Path) -> None:
    hybrid_module("zamba2").save_pretrained(tmp_path / "whole")
    folder = changed(tmp_path / "whole", tmp_path / "x", mamba_headdim=[7, 7])
    why = 'expected a value that can be read (TypeError: can only concatenate list (not "int") to list)'
    assert refusal(folder) == f"model: zamba2 has mamba_headdim [7, 7], {why}"


def test_lists_of_a_hybrid_that_no_layer_can_have_are_refused(tmp_path: Path) -> None:
    hybrid_module("zamba2").save_pretrained(tmp_path / "whole")
    folder = changed(tmp_path / "whole", tmp_path / "x", hybrid_layer_ids=[7, 7])
    assert refusal(folder) == "model: hybrid_layer_ids is [7, 7], expected [1, 2, 4] (layers_block_type)"
    hybrid_module("bamba").save_pretrained(tmp_path / "bamba")
    folder = changed(tmp_path / "bamba", tmp_path / "y", time_step_limit=[float("nan"), 1.0])
    assert refusal(folder) == f"model: {folder} has time_step_limit (nan, 1.0), expected numbers"


def test_tied_heads_and_rotations_are_no_fault(tmp_path: Path) -> None:
    folder = save_random_model(tmp_path / "tied", "llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in tensor_names(folder)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)

    prompts = random_prompts(3)
    want, got = (
        [output.tokens for output in Engine(each, max_len=128, device="cpu").generate(prompts, EIGHT)]
        for each in (folder, changed(folder, tmp_path / "older", add))
    )
    assert want == got


# --- what a folder is


def dflash(tensors: dict[str, Tensor]) -> None:
    """Replace tensors by those of a DFlash drafter: layers and a projection of states, no embedding and no head."""
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        del tensors[name]
    tensors["fc.weight"], tensors["hidden_norm.weight"] = torch.ones(96, 192), torch.ones(96)


def eagle(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        if not name.startswith("model.layers.0.") or "input_layernorm" in name:
            del tensors[name]
    tensors["fc.weight"] = torch.ones(96, 192)


def test_another_kind_of_folder_is_named(folder: Path, tmp_path: Path) -> None:
    target, head = tiny_model("target"), tiny_model("eagle3")
    drafter = changed(folder, tmp_path / "dflash", dflash, architectures=["DFlashDraftModel"])
    first = changed(folder, tmp_path / "eagle", eagle)
    adapter = tmp_path / "lora"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    medusa = changed(folder, tmp_path / "medusa")
    (medusa / "model.safetensors").rename(medusa / "medusa_lm_head.safetensors")

    def of(kind: Callable[[Path], Draft], path: Path) -> str:
        return refusal(target, draft=kind(path))

    assert of(Eagle, head) == (f"EAGLE head: {head} is an EAGLE-3 head, expected an EAGLE head (Eagle3 drafts with it)")
    assert of(Eagle3, first) == (
        f"EAGLE-3 head: {first} is an EAGLE head, expected an EAGLE-3 head (Eagle drafts with it)"
    )
    assert of(Eagle3, target) == (
        f"EAGLE-3 head: {target} is a language model, expected an EAGLE-3 head (Standalone drafts with it)"
    )
    for kind, name in ((Eagle, "EAGLE head"), (Eagle3, "EAGLE-3 head"), (Standalone, "draft model")):
        for path, words, hint in (
            (drafter, "a DFlash drafter", "DFlash drafts with it"),
            (medusa, "heads of Medusa", "nothing here drafts with it"),
        ):
            message = of(kind, path)
            assert message.startswith(f"{name}: {path} is {words}, expected a")
            assert message.endswith(f"({hint})")
    for path in (head, first):
        assert of(Standalone, path).startswith(f"draft model: {path} is an EAGLE")
        assert refusal(path).startswith(f"model: {path} is an EAGLE")
    assert of(Standalone, adapter) == (
        f"draft model: {adapter} is an adapter of PEFT, expected a language model "
        "(Engine takes one as its model, or as adapter= with its base)"
    )


def test_an_unknown_model_type_is_named_and_its_code_not_run(folder: Path, tmp_path: Path) -> None:
    other = changed(folder, tmp_path / "x", model_type="mine", auto_map={"AutoConfig": "code.Config"})
    (other / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert refusal(other) == (
        f"model: {other} has model_type 'mine', "
        "expected one that transformers knows (code that comes with a model is not run)"
    )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("fails", ["the draft's folder", "the draft", "the pool", "the scheduler"])
def test_a_module_is_as_it_was_where_the_engine_fails(
    fails: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far it came: another engine takes it, and so do `hf.generate` and transformers itself."""
    model = loaded(folder)
    prompts = random_prompts(2)
    want = [output.tokens for output in Engine(folder, max_len=64, device="cpu").generate(prompts, EIGHT)]
    buffers = [name for name, _ in model.named_buffers()]

    def failing(**options: Any) -> None:
        with pytest.raises((ValueError, RuntimeError, OSError)):
            Engine(model, max_len=64, device="cpu", **options)

    if fails == "the draft's folder":
        failing(draft=Eagle3(tiny_model("target")))
    elif fails == "the draft":
        failing(draft=Standalone(tiny_model("target")))  # of another vocabulary
    elif fails == "the pool":
        failing(num_pages=1)
    else:
        with monkeypatch.context() as patch:

            def refuse(*_arguments: Any, **_options: Any) -> None:
                raise RuntimeError("no room")

            patch.setattr("specdec_kernels._C.Scheduler", refuse)
            failing(draft=Ngram())

    assert [name for name, _ in model.named_buffers()] == buffers
    engine = Engine(model, draft=Ngram(), max_len=64, device="cpu")
    assert [output.tokens for output in engine.generate(prompts, EIGHT)] == want
    ids = torch.tensor(prompts[:1])
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for own in ({"custom_generate": hf.generate}, {}):
        assert model.generate(ids, **options, **own)[0, ids.shape[1] :].tolist() == want[0]


# --- files


def test_files_are_those_that_an_index_names(tmp_path: Path) -> None:
    """Other files of the folder are not read; some hold no tensors."""
    torch.save({"fc.weight": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    torch.save({"step": 7}, tmp_path / "training_args.bin")
    torch.save({"optimizer": torch.ones(3)}, tmp_path / "optimizer.bin")
    assert load_tensors(tmp_path).keys() == {"fc.weight"} == set(tensor_names(tmp_path))
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "two.safetensors")
    save_file({"c": torch.ones(1)}, tmp_path / "three.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert load_tensors(tmp_path).keys() == {"a", "b"} == set(tensor_names(tmp_path))
    index.write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    with pytest.raises(ValueError, match=r"names \.\./one.safetensors, expected files of its own folder"):
        load_tensors(tmp_path)
    for content, said in (
        ({"weight_map": {"a": 3}}, "has 3 for a, expected the name of a file"),
        ({"weight_map": [3]}, "has no weight_map, expected one from tensors to files"),
        (3, "has no weight_map, expected one from tensors to files"),
    ):
        index.write_text(json.dumps(content))
        with pytest.raises(ValueError) as error:
            load_tensors(tmp_path)
        assert str(error.value) == f"checkpoint: {index} {said}"
    save_file({"d": torch.ones(1)}, tmp_path / "model.safetensors")
    assert load_tensors(tmp_path).keys() == {"d"}
    (tmp_path / "model.safetensors").write_bytes(b"not so")
    with pytest.raises(
        ValueError, match=r"checkpoint: .*model.safetensors cannot be read, expected a file as its name"
    ):
        kind_of(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        load_tensors(tmp_path)
    assert str(error.value) == (
        f"checkpoint: {tmp_path} has no weights, expected one of model.safetensors, model.safetensors.index.json, "
        "pytorch_model.bin, pytorch_model.bin.index.json"
    )


# --- tokenizers and the ends of texts

MESSAGE = "generate: prompts[0] is text, expected token ids"


@pytest.fixture
def with_code(folder: Path, tmp_path: Path) -> Path:
    """Write a model whose tokenizer is code of its own, which writes a file when it runs."""
    other = changed(folder, tmp_path / "coded")
    (other / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", None]}})
    )
    (other / "code.py").write_text(
        "from transformers import PreTrainedTokenizer\n"
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "class Own(PreTrainedTokenizer):\n"
        "    vocab_size = 99\n"
        "    def get_vocab(self): return {chr(i): i for i in range(99)}\n"
        "    def _tokenize(self, text): return list(text)\n"
        "    def _convert_token_to_id(self, token): return ord(token) % 99\n"
        "    def _convert_id_to_token(self, index): return chr(index)\n"
    )
    return other


def test_code_of_a_folder_does_not_run(with_code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = io.StringIO("y\n" * 9)
    monkeypatch.setattr("sys.stdin", answers)
    engine = Engine(with_code, max_len=64, device="cpu")
    assert answers.tell() == 0, "something asked for an answer"
    assert not (tmp_path / "ran").exists()
    assert engine.generate([[1]], EIGHT)[0].tokens
    with pytest.raises(ValueError) as error:
        engine.generate("text", EIGHT)
    assert str(error.value).startswith(f"{MESSAGE} (the tokenizer of {with_code} does not load: ValueError: ")
    assert "trust_remote_code=True" in str(error.value)


def test_code_of_a_tokenizer_runs_where_it_is_trusted(with_code: Path, tmp_path: Path) -> None:
    engine = Engine(with_code, max_len=64, device="cpu", trust_remote_code=True)
    assert (tmp_path / "ran").exists()
    assert engine.generate("text", EIGHT)[0].prompt_tokens == [ord(letter) % 99 for letter in "text"]


def test_why_a_tokenizer_does_not_load_is_said(folder: Path, tmp_path: Path) -> None:
    corrupt = changed(folder, tmp_path / "x")
    (corrupt / "tokenizer.json").write_text("{")
    (corrupt / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    for model, reason in (
        (corrupt, f"the tokenizer of {corrupt} does not load: "),
        (folder, "the model folder has no tokenizer"),
        (loaded(folder), "the model is a module, and no tokenizer= is given"),
    ):
        engine = Engine(model, max_len=64, device="cpu")
        with pytest.raises(ValueError) as error:
            engine.generate("text", EIGHT)
        assert str(error.value).startswith(f"{MESSAGE} ({reason}")
        with pytest.raises(ValueError) as error:
            engine.generate([[1]], SamplingParams(stop="x"))
        assert str(error.value).startswith(f"SamplingParams: stop is given, expected none ({reason}")


def test_a_tokenizer_that_is_asked_for_has_to_load(folder: Path) -> None:
    assert refusal(folder, tokenizer=folder) == (
        f"Engine: tokenizer is {folder}, expected one that loads ({folder} has no tokenizer)"
    )


@pytest.mark.parametrize("given", [tokenizer, lambda: tiny_model("target"), lambda: str(tiny_model("target"))])
def test_a_module_takes_a_tokenizer(given: Callable[[], Any]) -> None:
    engine = Engine(loaded(tiny_model("target")), tokenizer=given(), max_len=64, device="cpu")
    (want,) = Engine(tiny_model("target"), max_len=64, device="cpu").generate("def f(", EIGHT)
    (got,) = engine.generate("def f(", EIGHT)
    assert (got.tokens, got.text, got.prompt_tokens) == (want.tokens, want.text, want.prompt_tokens)


def test_all_tokens_that_end_a_text_do(folder: Path, tmp_path: Path) -> None:
    """The generation config's, which may be several, as transformers has it; else the config's; else none."""
    prompts = random_prompts(1)
    (free,) = Engine(folder, max_len=128, device="cpu").generate(prompts, SamplingParams(24))
    stop = free.tokens[5]
    end = free.tokens.index(stop) + 1
    assert end < 24
    other = changed(folder, tmp_path / "x")
    other_token = next(token for token in range(199) if token not in free.tokens)
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [other_token, stop]}))
    named = changed(folder, tmp_path / "y", eos_token_id=[other_token, stop])
    (named / "generation_config.json").unlink()
    for model in (other, named, loaded(other)):
        (got,) = Engine(model, max_len=128, device="cpu").generate(prompts, SamplingParams(24))
        assert got.tokens == free.tokens[:end]
    want = loaded(other).generate(torch.tensor(prompts), max_new_tokens=24, do_sample=False, pad_token_id=0)
    assert want[0, len(prompts[0]) :].tolist() == free.tokens[:end]
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, stop]}))  # -1: none
    (got,) = Engine(other, max_len=128, device="cpu").generate(prompts, SamplingParams(24))
    assert got.tokens == free.tokens[:end]
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    assert refusal(other) == (f"model: {other} has eos_token_id '</s>' in its generation config, expected token ids")
    (other / "generation_config.json").write_text("{")
    with pytest.raises(OSError, match="generation_config"):
        Engine(other, max_len=128, device="cpu")


# --- conversations

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{{ suffix or '' }}{% endif %}"
)


@pytest.fixture(scope="module")
def chatting() -> Engine:
    """Return the tiny model with a tokenizer that has a chat template and adds a BOS."""
    model = tiny_model("target")
    own = AutoTokenizer.from_pretrained(model, chat_template=TEMPLATE)
    bos = own.bos_token
    own._tokenizer.post_processor = TemplateProcessing(f"{bos} $A", special_tokens=[(bos, own.bos_token_id)])
    return Engine(model, tokenizer=own, max_len=128, device="cpu")


TALK = [{"role": "user", "content": "def f(x):"}, {"role": "assistant", "content": "return"}]


def test_chat_goes_by_the_template(chatting: Engine) -> None:
    output = chatting.chat(TALK, EIGHT)
    assert isinstance(output, RequestOutput)
    text = chatting.tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert text.endswith("# user: def f(x):\n# assistant: return\n# assistant:")
    bos = chatting.tokenizer.bos_token_id
    assert output.prompt_tokens.count(bos) == 1 and output.prompt_tokens[0] == bos
    assert chatting.tokenizer.decode(output.prompt_tokens) == text
    (same,) = chatting.generate(text, EIGHT, add_special_tokens=False)
    assert (same.prompt_tokens, same.tokens) == (output.prompt_tokens, output.tokens)
    (twice,) = chatting.generate(text, EIGHT)
    assert twice.prompt_tokens == [bos, *output.prompt_tokens]


def test_several_conversations_and_options_of_the_template(chatting: Engine) -> None:
    other = [{"role": "user", "content": "import"}]
    outputs = chatting.chat([TALK, other], [EIGHT, SamplingParams(max_new_tokens=3)], suffix=" def")
    assert isinstance(outputs, list)
    assert [len(output.tokens) for output in outputs] == [8, 3]
    decoded = [chatting.tokenizer.decode(output.prompt_tokens) for output in outputs]
    assert decoded[1].endswith("# user: import\n# assistant: def") and "return" in decoded[0]
    going_on = chatting.chat(TALK, EIGHT, continue_final_message=True)
    assert isinstance(going_on, RequestOutput)
    assert chatting.tokenizer.decode(going_on.prompt_tokens).endswith("# assistant: return")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "chat: messages is a str, expected a list of messages, or a list of such lists"),
        ([], "chat: messages is empty, expected a list of messages, or a list of such lists"),
        (TALK[0], "chat: messages is a dict, expected a list of messages, or a list of such lists"),
        (["hello"], "chat: messages[0] is a str, expected a list of messages"),
        ([TALK, []], "chat: messages[1] is a list, expected a list of messages"),
        ([TALK, ["x"]], "chat: messages[1][0] is a str, expected a dict with a role and its content"),
        (
            [TALK[0], {"content": "x"}],
            "chat: messages[1] is without a role, expected a dict with a role and its content",
        ),
    ],
)
def test_what_are_no_messages(chatting: Engine, messages: Any, message: str) -> None:
    with pytest.raises(TypeError) as error:
        chatting.chat(messages)
    assert str(error.value) == message


def test_chat_without_a_template(folder: Path) -> None:
    with pytest.raises(ValueError) as error:
        Engine(folder, max_len=64, device="cpu").chat(TALK)
    assert str(error.value) == (
        "chat: messages need a chat template, expected a tokenizer with one (the model folder has no tokenizer)"
    )
    with pytest.raises(ValueError) as error:
        Engine(tiny_model("target"), max_len=64, device="cpu").chat(TALK)
    assert str(error.value) == "chat: the tokenizer has no chat template, expected one, or chat_template="


def test_an_index_says_which_file_has_a_tensor(tmp_path: Path) -> None:
    """Another file may hold one of the same name, and others that the index does not name."""
    first, second = {"a": torch.zeros(2), "b": torch.zeros(3)}, {"a": torch.ones(2), "c": torch.ones(1)}
    save_file(first, tmp_path / "1.safetensors")
    save_file(second, tmp_path / "2.safetensors")
    index = {"weight_map": {"a": "1.safetensors", "c": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = load_tensors(tmp_path)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {"a": [0.0, 0.0], "c": [1.0]}


def test_what_transformers_keeps_in_float32_stays_in_it(tmp_path: Path) -> None:
    """ERNIE 4.5's routers stay in float32: in 16 bits they would choose other experts."""
    other = save_random_model(tmp_path / "x", "ernie4_5_moe")
    model = Engine(other, max_len=64, device="cpu", dtype=torch.bfloat16).target.model
    module = AutoModelForCausalLM.from_pretrained(other, dtype=torch.bfloat16)
    kinds = {name: parameter.dtype for name, parameter in module.named_parameters()}
    assert set(kinds.values()) == {torch.bfloat16, torch.float32}
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == kinds


@pytest.mark.parametrize("as_folder", [False, True])
def test_gguf_file_is_refused_with_how_to_convert_it(as_folder: bool, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert refusal(tmp_path if as_folder else file) == (
        f"Engine: model: {file} is a GGUF file, expected a folder with config.json and safetensors "
        f"(AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, gguf_file='model.gguf').save_pretrained(folder) of "
        "transformers writes one, and AutoTokenizer the same way)"
    )
