"""Heads of EAGLE and EAGLE-2 against the published forward pass, written out in plain torch without pages or rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig

from specdec_kernels.engine import Eagle, Engine, SamplingParams
from specdec_kernels.models.heads.eagle import EagleHead
from specdec_kernels.models.heads.loading import load_head
from specdec_kernels.synthetic.models import SyntheticText, synthetic_causal_lm
from specdec_kernels.synthetic.shapes import shape_config
from specdec_kernels.tiny import tiny_model
from support.eagle_heads import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, random_tensors, write_head
from support.recorded_chains import record_chains
from support.tiny_checkpoint import held_out, reference_model, target_with_features


def published_forward(tensors: dict[str, Tensor], pairs: Tensor) -> Tensor:
    """Return [T, H] for embeddings of tokens 1.. and features of positions 0.., concatenated [T, 2 H]."""

    def linear(name: str, x: Tensor) -> Tensor:
        return functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def rotate(x: Tensor) -> Tensor:
        half = HEAD_DIM // 2
        angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    x, name = linear("fc", pairs), "layers.0.self_attn."
    q, k, v = (linear(f"{name}{which}_proj", x).unflatten(-1, (-1, HEAD_DIM)) for which in "qkv")
    q, k, v = (t.transpose(0, 1) for t in (rotate(q), rotate(k), v))
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=0) for t in (k, v))
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
    x = x + linear(name + "o_proj", attended)
    normed = functional.rms_norm(x, (HIDDEN,), tensors["layers.0.post_attention_layernorm.weight"], 1e-5)
    gated = functional.silu(linear("layers.0.mlp.gate_proj", normed)) * linear("layers.0.mlp.up_proj", normed)
    return x + linear("layers.0.mlp.down_proj", gated)


@torch.inference_mode()
def published_chain(tensors: dict[str, Tensor], text: list[int], steps: int) -> tuple[list[int], float]:
    """Recompute the chain drafted after a text; return it, and the least margin with which a token of it was chosen."""
    model = reference_model()
    states = model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]  # after the final norm
    embedding, head = model.get_input_embeddings().weight, model.lm_head.weight
    pairs = torch.cat([embedding[text[1:]], states[:-1]], dim=-1)
    chain, margin = [], float("inf")
    for _ in range(steps):
        last = published_forward(tensors, pairs)[-1]
        best = (head @ last).topk(2)
        chain.append(int(best.indices[0]))
        margin = min(margin, float(best.values[0] - best.values[1]))
        pairs = torch.cat([pairs, torch.cat([embedding[chain[-1]], last])[None]])
    return chain, margin


@pytest.mark.parametrize("bias", [False, True])
def test_chains_are_those_of_the_published_forward(bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round's chain of three requests in a batch; a row or rotation off by one would change nearly all of them."""
    tensors, steps = random_tensors(bias), 4
    engine = Engine(
        tiny_model("target"),
        draft=Eagle(write_head(tmp_path / "head", tensors), num_steps=steps, topk=1),
        adaptive=False,
        max_len=256,
        num_slots=3,
        page_size=3,
        prefill_chunk=7,
        rounds_in_flight=1,
        dtype=torch.float32,
        device="cpu",
    )
    drafted = record_chains(engine, monkeypatch)
    prompts = [prompt[:n] for prompt, n in zip(held_out("code"), (20, 33, 9), strict=False)]
    texts = [out.prompt_tokens + out.tokens for out in engine.generate(prompts, SamplingParams(max_new_tokens=12))]
    same = total = 0
    for length, chain in drafted:
        for text in texts:
            if length < len(text):
                want, margin = published_chain(tensors, text[: length + 1], steps)
                if chain == want or margin < 1e-3:
                    same += 1
                    break
        total += 1
    assert total >= 20 and same == total, (same, total)


def synthetic_head(target: Any) -> EagleHead:
    """Return a head that reads only the token, so that the target's own `lm_head` gives its successor."""
    config = LlamaConfig(**{name: value for name, value in target.config.to_dict().items() if name != "model_type"})
    config.num_hidden_layers = 1
    head = EagleHead(config)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0, 1e-3)
        head.fc.weight[:, : config.hidden_size] += torch.eye(config.hidden_size)
        head.embed_tokens, head.lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    return head


@pytest.mark.parametrize("topk", [1, 3])
def test_a_synthetic_head_is_right(topk: int) -> None:
    config = shape_config("tiny")
    text = SyntheticText.of(config.vocab_size, 512)
    target = synthetic_causal_lm(config, text, device=torch.device("cpu"), dtype=torch.float32)
    engine = Engine(
        target,
        draft=Eagle(synthetic_head(target), num_steps=4, topk=topk),
        adaptive=False,
        max_len=128,
        num_slots=2,
        device="cpu",
    )
    outputs = engine.generate([text.tokens(3, 20), text.tokens(200, 9)], SamplingParams(max_new_tokens=41))
    assert [out.tokens for out in outputs] == [text.tokens(23, 41), text.tokens(209, 41)]
    assert all(out.stats.accept_length == 5 for out in outputs)


def test_checkpoints_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    target = target_with_features((4,))

    def refusal(source: Any) -> str:
        with pytest.raises(ValueError) as error:
            load_head(EagleHead, source, target, num_pages=8, page_size=16)
        return str(error.value)

    tensors = random_tensors(bias=False)
    shared = load_head(EagleHead, write_head(tmp_path / "x", tensors), target, num_pages=8, page_size=16)
    assert shared.embed_tokens is target.embedding and shared.lm_head is target.lm_head
    missing = {name: t for name, t in tensors.items() if not name.startswith("layers.0.mlp")}
    assert refusal(write_head(tmp_path / "a", missing)) == (
        f"EAGLE head: {tmp_path / 'a'} lacks layers.0.mlp.gate_proj.weight, layers.0.mlp.up_proj.weight, "
        "layers.0.mlp.down_proj.weight, expected every tensor of the head and no other"
    )
    assert refusal(write_head(tmp_path / "b", tensors | {"norm.weight": torch.ones(HIDDEN)})) == (
        f"EAGLE head: {tmp_path / 'b'} has norm.weight, unknown to EagleHead, "
        "expected every tensor of the head and no other"
    )
    assert refusal(write_head(tmp_path / "c", tensors | {"layers.2.mlp.up_proj.weight": torch.ones(1)})) == (
        f"EAGLE head: {tmp_path / 'c'} has layers.0, layers.2, expected layers from layers.0 on, none missing"
    )
    assert refusal(write_head(tmp_path / "d", tensors, hidden_size=128, head_dim=64)) == (
        "EAGLE head: hidden_size is 128, expected the target's 256"
    )
    assert refusal(write_head(tmp_path / "e", tensors, hidden_act="gelu")) == (
        "EAGLE head: hidden_act is 'gelu', expected 'silu'"
    )
    assert refusal(write_head(tmp_path / "f", tensors, num_attention_heads=0)) == (
        f"EAGLE head: num_attention_heads is 0, expected a number from 1 on ({tmp_path / 'f'})"
    )
    assert refusal(write_head(tmp_path / "g", tensors | {"fc.weight": torch.ones(HIDDEN, HIDDEN)})) == (
        f"EAGLE head: {tmp_path / 'g'} has fc.weight of shape [256, 256], expected [256, 512], "
        "expected every tensor of the head and no other"
    )
    embedding = torch.ones(1024, HIDDEN)
    assert refusal(write_head(tmp_path / "h", tensors | {"embed_tokens.weight": embedding}, vocab_size=1024)) == (
        "EAGLE head: embed_tokens.weight has 1024 rows, expected at least the target's 2048"
    )
    with pytest.raises(ValueError) as error:
        Eagle(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    assert str(error.value) == "Eagle: head is a Linear, expected a folder, a hub id or an EagleHead"


def test_tensors_that_other_exporters_write(tmp_path: Path) -> None:
    """Rotations, which follow from the config; the number of layers that the target has; a head of its own."""
    target = target_with_features((4,))
    tensors = random_tensors(bias=True)
    lm_head = torch.randn(2048, HIDDEN)
    others = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32), "lm_head.weight": lm_head}
    folder = write_head(tmp_path / "x", tensors | others, num_hidden_layers=36)
    head = load_head(EagleHead, folder, target, num_pages=8, page_size=16)
    assert torch.equal(head.lm_head.weight, lm_head)
    assert torch.equal(head.fc.bias, tensors["fc.bias"])
