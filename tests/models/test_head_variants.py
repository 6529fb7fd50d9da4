"""Published variants of EAGLE and EAGLE-3 heads.

Chains are compared with a forward pass in float64 without pages or rounds; the packaged head is written in the layouts
of exporters.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from specdec_kernels.engine import Draft, DraftBudget, Eagle, Eagle3, Engine, SamplingParams
from specdec_kernels.engine.drafts.proposal import scored_tree_of
from specdec_kernels.models.backends.native import CausalLM
from specdec_kernels.models.heads.eagle import EagleHead
from specdec_kernels.models.heads.eagle3 import Eagle3Head
from specdec_kernels.models.heads.loading import load_head
from specdec_kernels.tiny import tiny_model
from support.exhaustive import covering, thinned
from support.recorded_chains import record_chains
from support.tiny_checkpoint import held_out, reference_model, target_with_features

HIDDEN, WIDE, VOCAB, STEPS, EPS = 256, 320, 2048, 3, 1e-5
LAYER_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 36,  # the target's, as some exporters leave it: the tensors decide
    "vocab_size": VOCAB,
    "rms_norm_eps": EPS,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
}

LATENT: dict[str, Any] = {
    "kv_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 40, "num_key_value_heads": 4,
}  # fmt: skip
YARN: dict[str, Any] = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 1.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip

# Of each: whether it is EAGLE-3, its config beside the above, and how its tensors differ from one plain layer's.
VARIANTS: dict[str, tuple[bool, dict[str, Any], dict[str, Any]]] = {
    "eagle3": (True, {}, {}),
    "before residual": (True, {"norm_before_residual": True}, {}),
    "before fc": (True, {"eagle_config": {"norm_before_fc": True}}, {}),
    "3.1": (True, {"fc_norm": True, "norm_output": True, "norm_before_residual": True}, {}),
    "two layers": (True, {"norm_output": True}, {"layers": 2}),
    "three layers, Qwen3's": (True, {"head_dim": 128}, {"layers": 3, "qk_norm": True}),
    "biases": (True, {"eagle_aux_hidden_state_layer_ids": [0, 4]}, {"biases": "qkv", "features": 2}),
    "all biases": (True, {}, {"biases": "qkvo", "fc_bias": True, "mlp_bias": True}),
    "window": (
        True,
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7, "num_hidden_layers": 2},
        {"layers": 2},
    ),
    "heads of 80": (True, {"head_dim": 80}, {"qk_norm": True, "biases": "qkvo"}),
    "heads of 32, speculators' other name": (
        True,
        {"head_dim": 32, "aux_hidden_state_layer_ids": [0, 3, 4]},
        {"layers": 2},
    ),
    "half rotated": (True, {"partial_rotary_factor": 0.5}, {}),
    "narrower than the target": (
        True,
        {"hidden_size": 192, "head_dim": 64, "eagle_config": {"norm_before_fc": True}},
        {},
    ),
    "wider than the target": (
        True,
        {"hidden_size": 320, "head_dim": 64, "fc_norm": True, "target_hidden_size": HIDDEN},
        {},
    ),
    "latent": (True, LATENT, {}),
    "latent with YaRN": (
        True,
        LATENT | {"q_lora_rank": 40, "rope_scaling": YARN, "fc_norm": True, "norm_output": True},
        {"layers": 2},
    ),
    "mrope": (False, {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}, {}),
    "eagle with heads of 96": (False, {"head_dim": 96}, {"layers": 2}),
    "eagle of two layers": (False, {}, {"layers": 2, "fc_bias": True}),
    "eagle with a norm": (False, {}, {"first_norm": True, "qk_norm": True}),
    "eagle's own vocabulary": (False, {}, {"draft_vocab": 512}),
}


def random_head(
    eagle3: bool,
    config: dict[str, Any],
    *,
    layers: int = 1,
    biases: str = "",
    qk_norm: bool = False,
    fc_bias: bool = False,
    mlp_bias: bool = False,
    first_norm: bool = False,
    features: int = 3,
    draft_vocab: int = 1024,
) -> dict[str, Tensor]:
    torch.manual_seed(11)
    head_dim, hidden = config.get("head_dim", 64), config.get("hidden_size", HIDDEN)
    tensors: dict[str, Tensor] = {}

    def product(name: str, out: int, inputs: int, bias: bool = False) -> None:
        tensors[f"{name}.weight"] = torch.randn(out, inputs) / inputs**0.5
        if bias:
            tensors[f"{name}.bias"] = torch.randn(out) / 4

    def norm(name: str, width: int = hidden) -> None:
        tensors[f"{name}.weight"] = torch.rand(width) + 0.5

    flags = config | config.get("eagle_config", {})
    if flags.get("norm_before_fc"):
        norm("input_norm", features * HIDDEN)
    if flags.get("fc_norm"):
        for index in range(features):
            norm(f"fc_norm.{index}", HIDDEN)
    product("fc", hidden, (features if eagle3 else 2) * HIDDEN, fc_bias)
    for index in range(layers):
        name = f"layers.{index}."
        inputs = 2 * hidden if eagle3 and index == 0 else hidden
        if "kv_lora_rank" in config:
            rank, rope, nope, v, _ = (config[size] for size in LATENT)
            queries, lora = 4 * (nope + rope), config.get("q_lora_rank")
            product(f"{name}self_attn.{'q_a' if lora else 'q'}_proj", lora or queries, inputs)
            if lora:
                norm(f"{name}self_attn.q_a_layernorm", lora)
                product(f"{name}self_attn.q_b_proj", queries, lora)
            product(f"{name}self_attn.kv_a_proj_with_mqa", rank + rope, inputs)
            norm(f"{name}self_attn.kv_a_layernorm", rank)
            product(f"{name}self_attn.kv_b_proj", 4 * (nope + v), rank)
            product(f"{name}self_attn.o_proj", hidden, 4 * v)
        else:
            for which, heads in (("q", 4), ("k", 2), ("v", 2)):
                product(f"{name}self_attn.{which}_proj", heads * head_dim, inputs, which in biases)
            product(f"{name}self_attn.o_proj", hidden, 4 * head_dim, "o" in biases)
        for which in ("q", "k") if qk_norm else ():
            norm(f"{name}self_attn.{which}_norm", head_dim)
        for which in ("gate", "up"):
            product(f"{name}mlp.{which}_proj", WIDE, hidden, mlp_bias)
        product(f"{name}mlp.down_proj", hidden, WIDE, mlp_bias)
        norm(f"{name}post_attention_layernorm")
        if eagle3 or index or first_norm:
            norm(f"{name}input_layernorm")
        if eagle3 and index == 0:
            norm(f"{name}hidden_norm")
    if eagle3:
        norm("norm")
    if eagle3 or draft_vocab != 1024:
        product("lm_head", draft_vocab, hidden)
        ids = torch.randperm(VOCAB)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
    if hidden != HIDDEN:
        product("embed_tokens", VOCAB, hidden)
    return tensors


class Reference:
    """The head in float64, over the features of a whole text at once."""

    def __init__(self, eagle3: bool, config: dict[str, Any], tensors: dict[str, Tensor], layers: int) -> None:
        self.eagle3, self.layers, self.head_dim = eagle3, layers, config.get("head_dim", 64)
        self.config = config | config.get("eagle_config", {})
        self.t = {name: tensor.double() for name, tensor in tensors.items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.t[f"{name}.weight"], self.t.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor, eps: float = EPS) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self.t[f"{name}.weight"]

    def rotate(self, x: Tensor) -> Tensor:
        half = int(self.head_dim * self.config.get("partial_rotary_factor", 1)) // 2
        angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second, rest = x.split([half, half, self.head_dim - 2 * half], dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def latent(self, name: str, x: Tensor) -> Tensor:
        """Return the outputs of latent attention, by keys and values of each head."""
        rank, rope, nope, v, heads = (self.config[size] for size in LATENT)
        if self.config.get("q_lora_rank"):
            q = self.linear(
                f"{name}q_b_proj", self.norm(f"{name}q_a_layernorm", self.linear(f"{name}q_a_proj", x), 1e-6)
            )
        else:
            q = self.linear(f"{name}q_proj", x)
        row = self.linear(f"{name}kv_a_proj_with_mqa", x)
        keys_values = self.linear(f"{name}kv_b_proj", self.norm(f"{name}kv_a_layernorm", row[:, :rank], 1e-6))
        k, values = keys_values.unflatten(-1, (heads, nope + v)).split([nope, v], dim=-1)
        scaling = self.config.get("rope_scaling")
        scale, frequencies = (nope + rope) ** -0.5, 10000.0 ** (-torch.arange(rope // 2).double() / (rope // 2))
        if scaling is not None:
            scale *= (0.1 * math.log(scaling["factor"]) + 1) ** 2
            # Both borders are where a pair turns once within the original length: pairs from there on are slower.
            turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
            border = (rope // 2) * math.log(scaling["original_max_position_embeddings"] / (2 * math.pi)) / math.log(1e4)
            low, high = math.floor(border), math.ceil(border)
            slow = ((torch.arange(rope // 2).double() - low) / max(high - low, 1e-3)).clamp(0, 1)
            assert turns[0] > 1 > turns[-1]
            frequencies = frequencies * (1 - slow) + frequencies / scaling["factor"] * slow
        angles = torch.arange(len(x))[:, None] * frequencies
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]

        def rotated(rows: Tensor) -> Tensor:
            pairs = torch.view_as_complex(rows.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * turn).flatten(-2)

        q = q.unflatten(-1, (heads, nope + rope))
        q = torch.cat([q[..., :nope], rotated(q[..., nope:])], -1)
        k = torch.cat([k, rotated(row[:, None, rank:]).expand(-1, heads, -1)], -1)
        q, k, values = (t.transpose(0, 1) for t in (q, k, values))
        out = functional.scaled_dot_product_attention(q, k, values, is_causal=True, scale=scale)
        return self.linear(f"{name}o_proj", out.transpose(0, 1).flatten(1))

    def attended(self, index: int, x: Tensor) -> Tensor:
        name = f"layers.{index}.self_attn."
        if "kv_lora_rank" in self.config:
            return self.latent(name, x)
        q, k, v = (self.linear(f"{name}{which}_proj", x).unflatten(-1, (-1, self.head_dim)) for which in "qkv")
        if f"{name}q_norm.weight" in self.t:
            q, k = self.norm(f"{name}q_norm", q), self.norm(f"{name}k_norm", k)
        q, k, v = (t.transpose(0, 1) for t in (self.rotate(q), self.rotate(k), v))
        k, v = (t.repeat_interleave(2, dim=0) for t in (k, v))
        distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
        seen = distance >= 0
        if self.config.get("layer_types", ["full_attention"] * 3)[index] == "sliding_attention":
            seen &= distance < self.config["sliding_window"]
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.linear(f"{name}o_proj", out.transpose(0, 1).flatten(1))

    def join(self, states: list[Tensor]) -> Tensor:
        if self.config.get("fc_norm"):
            states = [self.norm(f"fc_norm.{i}", state) for i, state in enumerate(states)]
        joined = torch.cat(states, -1)
        if self.config.get("norm_before_fc"):
            joined = self.norm("input_norm", joined)
        return self.linear("fc", joined)

    def __call__(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's feature for the next step and its normed state, [T, H] each."""
        if self.eagle3:
            feature = self.norm("layers.0.hidden_norm", features)
            x = torch.cat([self.norm("layers.0.input_layernorm", embedded), feature], -1)
            state = feature if self.config.get("norm_before_residual") else features
        else:
            state = x = self.linear("fc", torch.cat([embedded, features], -1))
            if "layers.0.input_layernorm.weight" in self.t:
                x = self.norm("layers.0.input_layernorm", x)
        for index in range(self.layers):
            name = f"layers.{index}."
            if index:
                x = self.norm(f"{name}input_layernorm", state)
            state = state + self.attended(index, x)
            x = self.norm(f"{name}post_attention_layernorm", state)
            gate, up = self.linear(f"{name}mlp.gate_proj", x), self.linear(f"{name}mlp.up_proj", x)
            state = state + self.linear(f"{name}mlp.down_proj", functional.silu(gate) * up)
        if not self.eagle3:
            return state, state
        normed = self.norm("norm", state)
        return normed if self.config.get("norm_output") else state, normed

    @torch.inference_mode()
    def chain(self, text: list[int]) -> tuple[list[int], float]:
        """Return the chain drafted after a text, and the least margin with which a token of it was chosen."""
        model = reference_model()
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states  # the last one after the norm
        table = self.t.get("embed_tokens.weight", model.get_input_embeddings().weight.double())
        if self.eagle3:
            layers = self.config.get("eagle_aux_hidden_state_layer_ids") or self.config.get(
                "aux_hidden_state_layer_ids", [2, 2, 1]
            )
            last_but_one = self.before_norm(text) if 4 in layers else None
            each = [last_but_one if layer == 4 else states[layer][0].double() for layer in layers]
            features = self.join([state[:-1] for state in each if state is not None])
        else:
            features = states[-1][0, :-1].double()
        head = self.t.get("lm_head.weight", model.lm_head.weight.double())
        tokens, chain, margin = text[1:], [], float("inf")
        for _ in range(STEPS):
            feature, predicts = (rows[-1] for rows in self(table[tokens], features))
            best = (head @ predicts).topk(2)
            choice = int(best.indices[0])
            chain.append(choice + int(self.t["d2t"][choice]) if "d2t" in self.t else choice)
            margin = min(margin, float(best.values[0] - best.values[1]))
            tokens, features = [*tokens, chain[-1]], torch.cat([features, feature[None]])
        return chain, margin

    def before_norm(self, text: list[int]) -> Tensor:
        """Return the states [T, H] that enter the target's final norm."""
        caught: list[Tensor] = []
        norm = reference_model().model.norm
        handle = norm.register_forward_pre_hook(lambda _module, inputs: caught.append(inputs[0][0].double()))
        reference_model()(torch.tensor([text]))
        handle.remove()
        return caught[0]


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def engine_of(draft: Draft) -> Engine:
    options = {"adaptive": False, "max_len": 256, "num_slots": 3, "page_size": 3, "prefill_chunk": 7}
    return Engine(tiny_model("target"), draft=draft, dtype=torch.float32, device="cpu", rounds_in_flight=1, **options)


@pytest.mark.parametrize("variant", thinned(VARIANTS, lambda name: name != "latent"))
def test_chains_are_those_of_the_variant(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round's chain of three requests in a batch; a norm in another place would change nearly all of them."""
    eagle3, changes, parts = VARIANTS[variant]
    tensors = random_head(eagle3, changes, **parts)
    folder = write(tmp_path / "head", LAYER_CONFIG | changes, tensors)
    reference = Reference(eagle3, changes, tensors, parts.get("layers", 1))
    engine = engine_of((Eagle3 if eagle3 else Eagle)(folder, num_steps=STEPS, topk=1))
    drafted = record_chains(engine, monkeypatch)
    prompts = [prompt[:n] for prompt, n in zip(held_out("code"), (20, 33, 9), strict=False)]
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=6))
    wanted = {
        (length, *chain) if margin > 1e-3 else (length,)
        for prompt, out in zip(prompts, outputs, strict=True)
        for length in range(len(prompt), len(prompt) + len(out.tokens))
        for chain, margin in [reference.chain((prompt + out.tokens)[: length + 1])]
    }
    right = [(length, *chain) in wanted or (length,) in wanted for length, chain in drafted]
    assert len(right) >= 12 and all(right), right


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"eagle_aux_hidden_state_layer_ids": [0, 2.5, 3]},
            "EAGLE-3 head: feature layers are (0, 2.5, 3), expected integers",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1.5, 3]}},
            "EAGLE-3 head: feature layers are (0, 1.5, 3), expected integers",
        ),
        (
            {"partial_rotary_factor": 0},
            "EAGLE-3 head: {folder} has partial_rotary_factor 0, expected a number above 0, at most 1",
        ),
    ],
)
def test_entry_that_is_no_layer_or_part_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "head", LAYER_CONFIG | changes, random_head(True, {}))
    with pytest.raises(ValueError) as error:
        engine_of(Eagle3(folder, num_steps=STEPS, topk=1))
    assert str(error.value) == message.format(folder=folder)


@pytest.mark.parametrize(("own_head", "kind"), covering([False, True], ["list", "tensor"]))
def test_frequent_tokens_are_all_that_is_drafted(
    kind: str, own_head: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a draft's logits are those of the full vocabulary at these tokens; the text is the target's own."""
    tensors = random_head(False, {})
    if own_head:
        tensors["lm_head.weight"] = torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5
    folder = write(tmp_path / "head", LAYER_CONFIG, tensors)
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:300].tolist()
    torch.save(ids if kind == "list" else torch.tensor(ids), tmp_path / "freq_300.pt")
    target = target_with_features((4,))
    whole = load_head(EagleHead, folder, target, num_pages=8, page_size=16)
    cut = load_head(EagleHead, whole, target, num_pages=8, page_size=16)
    cut.draft_among(sorted(ids))
    states = torch.randn(5, HIDDEN)
    assert torch.equal(cut.logits(states), whole.logits(states)[:, sorted(ids)])
    assert whole.id_map is None and cut.id_map is not None and cut.id_map.tolist() == sorted(ids)
    prompts, params = held_out("code")[:3], SamplingParams(max_new_tokens=16, ignore_eos=True)
    want = [output.tokens for output in engine_of(Draft()).generate(prompts, params)]
    for head, options in ((folder, {"topk": 4}), (whole, {"topk": 1, "sampled": True})):
        draft = Eagle(head, num_steps=STEPS, vocabulary=tmp_path / "freq_300.pt", **options)
        with engine_of(draft) as engine, monkeypatch.context() as patch:
            drafted = set[int]()
            propose = draft.propose

            def keep(slots: Tensor, budget: DraftBudget, propose: Any = propose, drafted: set[int] = drafted) -> Any:
                proposal = propose(slots, budget)
                tree = scored_tree_of(proposal.drafts, slots, budget.num_nodes, engine.state).tree
                for tokens, count in zip(tree.tokens.tolist(), tree.num_nodes.tolist(), strict=True):
                    drafted.update(tokens[1:count])
                return proposal

            patch.setattr(draft, "propose", keep)
            assert [output.tokens for output in engine.generate(prompts, params)] == want
            assert len(drafted) > 5 and drafted <= set(ids)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2, 2048], "has token 2048, expected 0 to 2047 (the target's)"),
        ([-1, 2], "has token -1, expected 0 to 2047 (the target's)"),
        ([1, 2, 1], "has a token twice, expected each once"),
        ([0.5], "has shape [1] and torch.float32, expected [tokens] integers, the ids of the target's tokens"),
        (torch.zeros(2, 2, dtype=torch.int64),
         "has shape [2, 2] and torch.int64, expected [tokens] integers, the ids of the target's tokens"),
    ],
)  # fmt: skip
def test_vocabularies_that_are_none_are_refused(value: Any, message: str, tmp_path: Path) -> None:
    folder, file = write(tmp_path / "head", LAYER_CONFIG, random_head(False, {})), tmp_path / "freq.pt"
    torch.save(value, file)
    with pytest.raises(ValueError) as error:
        engine_of(Eagle(folder, topk=2, vocabulary=file))
    assert str(error.value) == f"Eagle: vocabulary: {file} {message}"


def test_vocabularies_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder, file = write(tmp_path / "head", LAYER_CONFIG, random_head(False, {})), tmp_path / "freq.pt"
    torch.save([1, 2, 3], file)
    with pytest.raises(ValueError) as error:
        engine_of(Eagle(folder, topk=4, vocabulary=file))
    assert str(error.value) == "Eagle: vocabulary has 3 tokens, expected at least topk=4"
    own = write(tmp_path / "own", LAYER_CONFIG, random_head(False, {}, draft_vocab=512))
    with pytest.raises(ValueError) as error:
        engine_of(Eagle(own, topk=2, vocabulary=file))
    assert str(error.value) == "Eagle: vocabulary is given, expected None for a head with a vocabulary of its own"
    with pytest.raises(ValueError) as error:
        Eagle(folder, vocabulary=[1, 2])  # type: ignore[arg-type]
    assert str(error.value) == "Eagle: vocabulary is a list, expected a file of token ids or None"
    with pytest.raises(FileNotFoundError) as missing:
        engine_of(Eagle(folder, topk=2, vocabulary=tmp_path / "none.pt"))
    expected = "expected an existing file or a file of a hub id"
    assert str(missing.value) == f"Eagle: vocabulary is {tmp_path / 'none.pt'}, {expected}"
    file.write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"freq\.pt cannot be read, expected a file as its name says"):
        engine_of(Eagle(folder, topk=2, vocabulary=file))


# --- the packaged head, as others write it


def tiny_config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((tiny_model("eagle3") / "config.json").read_text())
    return config


def of_speculators() -> dict[str, Any]:
    """Return a config with the layer's part apart, and the entries that speculators adds."""
    config = tiny_config()
    outer = ("architectures", "eagle_config", "draft_vocab_size")
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": None,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny"}},
        "transformer_layer_config": {k: v for k, v in config.items() if k not in outer},
    }


def with_verifier(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return named | {"verifier_lm_head.weight": torch.ones(4, HIDDEN), "verifier_norm.weight": torch.ones(HIDDEN)}


def qkv_biases_of_zero(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    width = {which: len(tensors[f"midlayer.self_attn.{which}_proj.weight"]) for which in "qkv"}
    return tensors | {f"midlayer.self_attn.{which}_proj.bias": torch.zeros(width[which]) for which in "qkv"}


def with_a_layer_that_adds_nothing(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Its attention and its feed-forward part write zeros."""
    second = {}
    for name, tensor in tensors.items():
        if name.startswith("midlayer.") and "hidden_norm" not in name:
            zero = name.endswith(("o_proj.weight", "down_proj.weight"))
            same = torch.zeros_like(tensor) if zero else tensor
            wide = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            second[name.replace("midlayer.", "layers.1.")] = (same[:, :HIDDEN] if wide else same).clone()
    return tensors | second


LAYOUTS: dict[str, tuple[Any, Any]] = {
    "speculators": (of_speculators, with_verifier),
    "nested under model": (tiny_config, lambda tensors: {f"model.{name}": tensor for name, tensor in tensors.items()}),
    "rotations inside": (tiny_config, lambda tensors: tensors | {"midlayer.rotary_emb.inv_freq": torch.ones(32)}),
    "the target's number of layers": (lambda: tiny_config() | {"num_hidden_layers": 36}, dict),
    "biases": (lambda: tiny_config() | {"attention_bias": True}, qkv_biases_of_zero),
    "a second layer": (tiny_config, with_a_layer_that_adds_nothing),
}


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return target_with_features((1, 2, 3))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_packaged_head(layout: str, tmp_path: Path, target: CausalLM) -> None:
    """The same weights draft the same: as many rounds for the same text."""
    config, tensors = LAYOUTS[layout]
    source = load_file(tiny_model("eagle3") / "model.safetensors")
    folder = write(tmp_path / "head", config(), tensors(source))
    torch.save({"step": 7}, folder / "training_args.bin")
    own, other = (
        load_head(Eagle3Head, head, target, num_pages=8, page_size=16) for head in (tiny_model("eagle3"), folder)
    )
    assert torch.equal(own.fc.weight, other.fc.weight)
    prompts, params = held_out("code")[:3], SamplingParams(max_new_tokens=24, ignore_eos=True)
    runs = [
        [
            (output.tokens, output.stats.rounds)
            for output in engine_of(Eagle3(head, num_steps=4, topk=1)).generate(prompts, params)
        ]
        for head in (tiny_model("eagle3"), folder)
    ]
    assert runs[0] == runs[1]
    assert sum(rounds for _, rounds in runs[0]) < 60
