"""Our parts in the place of a module's own: where they give the same numbers, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.nanochat.modeling_nanochat import NanoChatRMSNorm

from specdec_kernels.engine import Engine, Ngram, SamplingParams
from specdec_kernels.models.backends.module_swaps import ModuleSwaps, is_rotation_of_halves, mlp_like, norm_like
from specdec_kernels.models.backends.select import open_language_model
from specdec_kernels.models.options import ModelOptions
from support.tiny_random_models import NATIVE, randomise, tiny_model

WIDTH = 96
DTYPES = [torch.float32, torch.bfloat16]


class Clamped(LlamaRMSNorm):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x).clamp(-2, 2)
        return out


class Shifted(LlamaRMSNorm):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x - x.mean(-1, keepdim=True))
        return out


class OtherEps(LlamaRMSNorm):  # type: ignore[misc]
    """What it says of its eps is not what it adds."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6)
        self.eps, self.variance_epsilon = 1e-6, 1e-3

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.weight * (x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("make", "weight"),
    [
        (lambda: LlamaRMSNorm(WIDTH, 1e-5), lambda norm: norm.weight),
        (lambda: GemmaRMSNorm(WIDTH, 1e-6), lambda norm: 1 + norm.weight),
        (lambda: nn.RMSNorm(WIDTH, 1e-6), lambda norm: norm.weight),
        (lambda: NanoChatRMSNorm(1e-6), lambda norm: torch.ones(WIDTH)),
        (lambda: Clamped(WIDTH, 1e-5), None),
        (lambda: Shifted(WIDTH, 1e-5), None),
        (lambda: OtherEps(WIDTH), None),
        (lambda: nn.LayerNorm(WIDTH), None),
        (lambda: nn.Linear(WIDTH, WIDTH), None),
    ],
    ids=["llama", "gemma", "torch", "without weight", "clamped", "shifted", "other eps", "layer norm", "product"],
)
def test_norms(make: Callable[[], Any], weight: Callable[[Any], Tensor] | None, dtype: torch.dtype) -> None:
    module = make()
    for parameter in module.parameters():
        parameter.data = 1 + 0.3 * torch.randn_like(parameter)
    module = module.to(dtype).requires_grad_(False)
    make_norm = norm_like(module, WIDTH, torch.empty(0, dtype=dtype))
    assert (make_norm is None) == (weight is None)
    if make_norm is not None and weight is not None:
        torch.testing.assert_close(make_norm().weight, weight(module).to(dtype))


class Gated(nn.Module):
    def __init__(self, act: nn.Module, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 160, bias=False), nn.Linear(WIDTH, 160, bias=False)
        self.down_proj, self.act_fn, self.combine = nn.Linear(160, WIDTH, bias=False), act, combine

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.combine(self.act_fn(self.gate_proj(x)), self.up_proj(x)))
        return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("act", "combine", "is_ours"),
    [
        (nn.SiLU(), torch.mul, True),
        (nn.GELU(), torch.mul, True),
        (nn.SiLU(), lambda gate, up: gate * up.clamp(max=7), False),
        (nn.SiLU(), lambda gate, up: gate * (up + 1), False),
        (nn.SiLU(), torch.add, False),
    ],
    ids=["silu", "gelu", "clamped", "one more", "a sum"],
)
def test_gated_parts(act: nn.Module, combine: Any, is_ours: bool, dtype: torch.dtype) -> None:
    """They are found by what they compute, and give what they gave, for rows of any shape."""
    module = Gated(act, combine)
    randomise(module)
    module = module.to(dtype).requires_grad_(False)
    x = torch.randn(2, 3, WIDTH).to(dtype)
    want, weights = module(x), [part.weight.clone() for part in (module.gate_proj, module.up_proj, module.down_proj)]
    made = ModuleSwaps(module, {module: WIDTH}).counts
    assert (
        made["mlps"] == is_ours
        and (mlp_like(Gated(act, combine).to(dtype).requires_grad_(False), WIDTH) is None) != is_ours
    )
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(module(x), want, rtol=tolerance, atol=tolerance)
    for part, weight in zip((module.gate_proj, module.up_proj, module.down_proj), weights, strict=True):
        assert torch.equal(part.weight, weight)


def test_rotations() -> None:
    """Of halves, all of a head, by cosines and sines of each angle once or twice."""
    q, k = torch.randn(1, 4, 3, 64), torch.randn(1, 2, 3, 64)
    angles = torch.rand(1, 3, 32)
    twice = torch.cat([angles, angles], -1)
    cosines, sines = twice.cos(), twice.sin()
    out = apply_rotary_pos_emb(q, k, cosines, sines)
    assert is_rotation_of_halves(q, k, out, (cosines, sines), {})
    assert is_rotation_of_halves(q, k, out, (angles.cos(), angles.sin()), {})
    assert not is_rotation_of_halves(q, k, out, (cosines, sines), {"unsqueeze_dim": 1})
    assert not is_rotation_of_halves(q, k, (out[0], out[1] * 1.01), (cosines, sines), {})
    assert not is_rotation_of_halves(q, k, out, (cosines, cosines), {})
    others = torch.rand(1, 3, 64)
    mixed = apply_rotary_pos_emb(q, k, others.cos(), others.sin())
    assert not is_rotation_of_halves(q, k, mixed, (others.cos(), others.sin()), {}), "two angles of one pair"


ALL = {"norms": 17, "mlps": 4, "linears": 29, "rotations": 4}


@pytest.mark.parametrize(
    ("model_type", "want"),
    [
        ("qwen3", ALL),
        ("gpt_oss", {"norms": 9, "linears": 17, "rotations": 4}),
        ("nanochat", {"norms": 17, "linears": 25}),  # which normalises what it has rotated
        ("laguna", {"norms": 17, "mlps": 4, "linears": 33}),  # which rotates a part of each head
        ("gemma4_text", {"norms": 34, "mlps": 4, "linears": 38}),
    ],
)
def test_what_stands_in(model_type: str, want: dict[str, int], device: torch.device) -> None:
    """The text is that of transformers; the model itself, whose weights they share, is what it was."""
    model = tiny_model(model_type, **(NATIVE if model_type in ("qwen3", "gpt_oss") else {})).to(device)
    prompt = torch.randint(5, 150, (21,)).tolist()
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens_of_prompt = torch.tensor([prompt], device=device)
    expected = model.generate(tokens_of_prompt, **options)[0, 21:].tolist()
    with Engine(
        model, draft=Ngram(num_nodes=6), implementation="transformers", adaptive=False, max_len=48, device=device,
        dtype=torch.float32,
    ) as engine:  # fmt: skip
        tokens = engine.generate([prompt], SamplingParams(max_new_tokens=12, ignore_eos=True))[0].tokens
        assert dict(engine.target.num_swaps) == want  # type: ignore[attr-defined]
    assert tokens == expected
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.generate(tokens_of_prompt, **options)[0, 21:].tolist() == expected


def test_products_follow_the_parameters_of_their_modules() -> None:
    """Another engine may fuse the weights of a module: no copy of them remains."""
    model = tiny_model("llama", **NATIVE)
    options = ModelOptions(max_len=32, num_pages=4, page_size=8, dtype=torch.float32, device=torch.device("cpu"))
    general = open_language_model(model, options, "transformers")
    open_language_model(model, options, "native")
    layer = model.model.layers[0]
    theirs = general._body.layers[0].self_attn.q_proj.weight  # type: ignore[attr-defined]
    assert theirs.data_ptr() == layer.self_attn.q_proj.weight.data_ptr()
    assert (
        layer.mlp.gate_proj.weight.untyped_storage().data_ptr() == layer.mlp.up_proj.weight.untyped_storage().data_ptr()
    )


@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen3"])
@pytest.mark.parametrize("by", ["update_weights", "sleep"])
def test_other_weights(model_type: str, by: str, tmp_path: Path) -> None:
    """Norms of 1 + weight and merged products follow them, too."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for seed, folder in enumerate(folders):
        tiny_model(model_type, seed, **NATIVE, tie_word_embeddings=False).save_pretrained(folder)
    prompt, params = torch.randint(5, 150, (21,)).tolist(), SamplingParams(max_new_tokens=12, ignore_eos=True)

    def open_engine(folder: Path) -> Engine:
        return Engine(folder, implementation="transformers", max_len=48, device="cpu", dtype=torch.float32)

    with open_engine(folders[0]) as engine, open_engine(folders[1]) as fresh:
        want, before = (each.generate([prompt], params)[0].tokens for each in (fresh, engine))
        assert before != want
        if by == "sleep":
            engine.sleep(2)
            engine.wake()
        engine.update_weights(load_file(folders[1] / "model.safetensors"))
        assert engine.generate([prompt], params)[0].tokens == want


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "dots1"])
def test_experts_are_multiplied_by_ours(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the module would do for those that it finds on the host."""
    from specdec_kernels.models.layers.moe import Experts

    called: list[str] = []
    plan = Experts.plan
    monkeypatch.setattr(Experts, "plan", lambda self, x, routes: called.append("") or plan(self, x, routes))
    model = tiny_model(model_type)
    with Engine(model, implementation="transformers", max_len=48, device="cpu", dtype=torch.float32) as engine:
        called.clear()
        engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=2, ignore_eos=True))
    assert called


def test_silu_is_that_of_the_function() -> None:
    """A part without a module for its activation is one of SiLU, if that is what it computes."""

    class Inline(Gated):
        def __init__(self) -> None:
            super().__init__(nn.SiLU(), torch.mul)
            del self.act_fn

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
            return out

    module = Inline()
    randomise(module)
    module = module.requires_grad_(False)
    assert mlp_like(module, WIDTH) is not None
