"""Feed-forward parts of experts: every way to multiply, every way to choose, and whole models."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

import specdec_kernels as sd
from specdec_kernels.engine import Engine, Ngram, SamplingParams, Standalone
from specdec_kernels.models.backends.select import open_language_model
from specdec_kernels.models.layers.fp8 import fake_quantize
from specdec_kernels.models.layers.linear import Linear
from specdec_kernels.models.layers.mlp import GatedMLP
from specdec_kernels.models.layers.moe import (
    FEW_ROWS,
    MAX_ROUTER_ROWS,
    MAX_SHARED_PAIRS,
    Experts,
    GroupedSoftmaxRouter,
    MoE,
    QuantizedExperts,
    Router,
    SigmoidRouter,
    SoftmaxRouter,
    TopKRouter,
    router_logits,
    routing_of,
)
from specdec_kernels.models.layers.outputs import ExpertOutputs, PartialSum, combined, select_rows
from specdec_kernels.models.layers.quantized import Fp8Weight
from specdec_kernels.models.layers.reduction import Reduction
from specdec_kernels.models.options import ModelOptions
from specdec_kernels.ops import Routing
from specdec_kernels.synthetic.models import SyntheticText, synthetic_causal_lm
from support.exhaustive import covering
from support.random_checkpoints import EXPERTS, random_prompts, save_random_model
from support.tiny_checkpoint import Comparison, greedy_by_transformers

# --- products


def experts(number: int, hidden: int, inner: int, dtype: torch.dtype, device: torch.device, bias: bool) -> Experts:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    gate_up, down = random(number, 2 * inner, hidden) / hidden**0.5, random(number, hidden, inner) / inner**0.5
    biases = (random(number, 2 * inner), random(number, hidden)) if bias else (None, None)
    return Experts(gate_up.mT, down.mT, *biases)


def routes(rows: int, number: int, taken: int, device: torch.device) -> Routing:
    """Return a layer with this many experts; no row takes the last two."""
    chosen = torch.rand(rows, number - 2, device=device).topk(taken).indices
    return routing_of(chosen, torch.rand(rows, taken, device=device), number)


def by_definition(part: Experts, x: Tensor, chosen: Routing) -> Tensor:
    """In float64, row by row."""
    out = torch.zeros(len(x), part.down.shape[2], dtype=torch.float64)
    for row, (of_row, shares) in enumerate(zip(chosen.topk_ids.tolist(), chosen.topk_weights.tolist(), strict=True)):
        for expert, share in zip(of_row, shares, strict=True):
            wide = x[row].double().cpu() @ part.gate_up[expert].double().cpu()
            if part.gate_up_bias is not None:
                wide = wide + part.gate_up_bias[expert].double().cpu()
            gate, up = wide.chunk(2)
            made = (functional.silu(gate) * up) @ part.down[expert].double().cpu()
            if part.down_bias is not None:
                made = made + part.down_bias[expert].double().cpu()
            out[row] += share * made
    return out


ERRORS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_every_way_gives_the_same_sums(dtype: torch.dtype, rows: int, bias: bool, device: torch.device) -> None:
    """Most experts are taken by several rows, some by none."""
    part = experts(12, 32, 48, dtype, device, bias)
    x, chosen = torch.randn(rows, 32, device=device).to(dtype), routes(rows, 12, 3, device)
    want = by_definition(part, x, chosen)
    for way in (part.by_torch_grouped_mm, part.by_gathered_weights, part.by_all_experts, part):
        got = way(x, chosen)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double().cpu(), want, rtol=ERRORS[dtype], atol=ERRORS[dtype])


@pytest.mark.parametrize("rows", [1, 7, 40, 80])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_our_op_gives_the_same_sums(dtype: torch.dtype, rows: int, device: torch.device) -> None:
    """Of weights in 16 bits as modules have them: of few rows on every GPU, of many where torch has no product."""
    part = experts(12, 64, 128, dtype, device, False)
    part = dataclasses.replace(part, down_bias=torch.randn(12, 64, device=device).to(dtype))
    x, chosen = torch.randn(rows, 64, device=device).to(dtype), routes(rows, 12, 3, device)
    few = rows * 3 <= FEW_ROWS * 12
    ours = x.is_cuda and (few or not part.has_torch_grouped_mm(x))
    assert part.fits_grouped_gemm(x) and part.plan(x, chosen) == ("moe_grouped_gemm" if ours else "grouped")
    got, want = part.by_grouped_gemm(x, chosen), by_definition(part, x, chosen)
    torch.testing.assert_close(got.double().cpu(), want, rtol=ERRORS[dtype], atol=ERRORS[dtype])


def test_experts_that_our_op_does_not_take() -> None:
    """Other numbers, widths, strides, biases, activations and roundings."""
    x, cpu = torch.zeros(1, 64, dtype=torch.bfloat16), torch.device("cpu")
    part = experts(4, 64, 128, torch.bfloat16, cpu, False)
    assert part.fits_grouped_gemm(x) and not part.fits_grouped_gemm(x.half())
    gate_up, bias = part.gate_up.contiguous(), torch.zeros(4, 256, dtype=torch.bfloat16)
    changes: tuple[dict[str, Any], ...] = (
        {"gate_up": gate_up},
        {"gate_up_bias": bias},
        {"act": torch.nn.GLU()},
        {"activations": "token"},
    )
    for change in changes:
        assert not dataclasses.replace(part, **change).fits_grouped_gemm(x)
    assert not experts(4, 64, 96, torch.bfloat16, cpu, False).fits_grouped_gemm(x)
    assert not experts(4, 64, 128, torch.float32, cpu, False).fits_grouped_gemm(x.float())


@pytest.mark.parametrize("activations", ["group", "token", "none"])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_every_way_of_eight_bits(rows: int, activations: str, device: torch.device) -> None:
    """The op on the weights as they are stored, and products with widened ones."""
    dense = experts(12, 256, 128, torch.float32, device, False)
    stored = QuantizedExperts(12, nn.SiLU())
    for number in range(12):
        gate, up = dense.gate_up[number].mT.chunk(2)
        for part, weight in (("gate", gate), ("up", up), ("down", dense.down[number].mT)):
            numbers, scales = sd.quantize_fp8(weight.contiguous(), group_size=None if activations == "token" else 128)
            stored.store(number, part, Fp8Weight(numbers, scales.t(), activations))
    part = stored.experts()
    x, chosen = torch.randn(rows, 256, device=device).bfloat16(), routes(rows, 12, 3, device)
    assert part.plan(x, chosen) == ("moe_grouped_gemm" if x.is_cuda else "gathered" if rows == 1 else "all")
    want = torch.zeros(rows, 256, dtype=torch.float64)
    for row, (of_row, shares) in enumerate(zip(chosen.topk_ids.tolist(), chosen.topk_weights.tolist(), strict=True)):
        for expert, share in zip(of_row, shares, strict=True):
            gate_up, down = (weight.double() for weight in part.weights_of(expert, torch.float32))
            gate, up = (fake_quantize(x[row : row + 1], activations).double() @ gate_up).chunk(2, 1)
            inner = fake_quantize((functional.silu(gate) * up).to(x.dtype), activations).double()
            want[row] += (share * inner @ down)[0].cpu()
    for way in (part.by_grouped_gemm, part.by_gathered_weights, part.by_all_experts, part):
        assert (way(x, chosen).double().cpu() - want).norm() <= 5e-2 * want.norm()
    assert torch.equal(stored(x, chosen.topk_ids, chosen.topk_weights), part(x, chosen))


def test_experts_of_eight_bits_that_the_op_does_not_take() -> None:
    """Widths that are no groups, and scales of other groups than the rows'."""
    for inner, groups, activations in ((160, 1, "token"), (128, 1, "group"), (128, 2, "token")):
        stored = QuantizedExperts(3, nn.SiLU())
        for number, (part, outs, ins) in itertools.product(
            range(3), (("gate", inner, 256), ("up", inner, 256), ("down", 256, inner))
        ):
            of_part = torch.rand(outs, min(groups, -(-ins // 128)))
            stored.store(number, part, Fp8Weight(torch.randn(outs, ins).to(torch.float8_e4m3fn), of_part, activations))
        assert not stored.experts().fits_grouped_gemm(torch.zeros(1, 256, dtype=torch.bfloat16))


def test_which_way_is_taken() -> None:
    """By shapes and dtype: on the CPU torch has a product of groups for all numbers, of strides of 16 bytes."""
    cpu = torch.device("cpu")
    x, few, many = torch.randn(9, 30), routes(2, 12, 3, cpu), routes(9, 12, 3, cpu)
    odd = experts(12, 30, 48, torch.float32, cpu, False)
    assert (odd.plan(x[:2], few), odd.plan(x, many)) == ("gathered", "all")
    assert experts(12, 32, 46, torch.float32, cpu, False).plan(torch.randn(9, 32), many) == "all"
    assert experts(12, 32, 48, torch.float32, cpu, False).plan(torch.randn(9, 32), many) == "grouped"
    torch.testing.assert_close(odd(x, many).double(), by_definition(odd, x, many), rtol=1e-5, atol=1e-5)


def test_what_an_expert_makes_of_others_rows_does_not_count() -> None:
    part = experts(4, 32, 48, torch.float16, torch.device("cpu"), False)
    part.down[3] *= 30000  # infinities, in float16
    x, chosen = torch.randn(20, 32).half(), routes(20, 4, 2, torch.device("cpu"))
    for way in (part.by_torch_grouped_mm, part.by_gathered_weights, part.by_all_experts):
        assert way(x, chosen).isfinite().all()


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_an_expert_may_be_repeated_in_a_row(dtype: torch.dtype, device: torch.device) -> None:
    """LongCat-Flash gives the place of a zero expert to some expert, with weight 0."""
    part = experts(4, 32, 48, dtype, device, False)
    x, ids = (
        torch.randn(6, 32, device=device).to(dtype),
        torch.tensor([[2, 2, 0], [1, 3, 1]], device=device).repeat(3, 1),
    )
    weights = torch.tensor([[0.7, 0.0, 0.3], [0.0, 0.4, 0.6]], device=device).repeat(3, 1)
    chosen = routing_of(ids, weights, 4)
    want = by_definition(part, x, chosen)
    for way in (part.by_torch_grouped_mm, part.by_gathered_weights, part.by_all_experts, part):
        torch.testing.assert_close(way(x, chosen).double().cpu(), want, rtol=ERRORS[dtype], atol=ERRORS[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 40])
def test_other_experts_when_a_graph_is_replayed(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("graphs are of GPUs")
    part = experts(12, 64, 48, dtype, device, False)
    router = SoftmaxRouter.of(Linear(torch.randn(12, 64, device=device).to(dtype), None), 3, True)
    x = torch.randn(rows, 64, device=device).to(dtype)
    part(x, router(x))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = part(x, router(x))
    for _ in range(3):
        x.normal_()
        graph.replay()
        want = by_definition(part, x, router(x))
        torch.testing.assert_close(out.double().cpu(), want, rtol=ERRORS[dtype], atol=ERRORS[dtype])


# --- shared experts


def moe_of(router: str, num_shared: int, dtype: torch.dtype, device: torch.device) -> MoE:
    """Return 12 experts (64, 128), 3 for each row, and a shared MLP of `num_shared` times their size."""

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device).to(dtype) / shape[-1] ** 0.5

    routers: dict[str, Router] = {
        "softmax": SoftmaxRouter.of(Linear(random(12, 64), None), 3, True),
        "gate": SoftmaxRouter.of(Linear(random(12, 64), None), 3, False, Linear(random(1, 64), None)),
        "groups": GroupedSoftmaxRouter(random(12, 64), 3, 4, 2, 1.5),
        "sigmoid": SigmoidRouter(random(12, 64), random(12, dtype=torch.float32), 3, 2, 1, True, 1.5),
    }
    shared = GatedMLP(Linear(random(2 * num_shared * 128, 64), None), Linear(random(64, num_shared * 128), None))
    return MoE(routers[router], experts(12, 64, 128, dtype, device, False), shared)


def with_shared_by_definition(part: MoE, x: Tensor) -> Tensor:
    """In float64, row by row."""
    assert part.shared is not None and isinstance(part.shared.down.weight, Tensor)
    rows, gate_up = x.double().cpu(), part.shared.gate_up.weight
    assert isinstance(gate_up, Tensor)
    gate, up = (rows @ gate_up.double().cpu().T).chunk(2, 1)
    out = (functional.silu(gate) * up) @ part.shared.down.weight.double().cpu().T
    if isinstance(part.router, SoftmaxRouter) and part.router.gates.sizes == (12, 1):
        out = out * (rows @ part.router.gates.whole.weight[12].double().cpu())[:, None].sigmoid()
    return out + by_definition(part.experts, x, part.router(x))


def rows_without_ties(part: MoE, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return rows whose scores differ by more than 16-bit roundings, so that every implementation routes them alike."""
    assert isinstance(part.router, TopKRouter)
    x = torch.randn(20 * count + 40, 64, device=device).to(dtype)
    gaps = part.router.scores(x)[0].float().sort(dim=1).values.diff(dim=1).amin(1)
    return x[gaps > 0.02][:count]


def joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a MoE multiply by `moe_grouped_gemm` on every device, as on a GPU."""
    monkeypatch.setattr(Experts, "uses_grouped_gemm", lambda self, x, pairs: self.fits_grouped_gemm(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 8, MAX_SHARED_PAIRS, MAX_SHARED_PAIRS + 1])
@pytest.mark.parametrize("num_shared", [1, 2, 3])
@pytest.mark.parametrize("router", ["softmax", "gate", "groups", "sigmoid"])
def test_shared_expert_in_the_launches_of_routed_ones_gives_the_same_sums(
    router: str,
    num_shared: int,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = moe_of(router, num_shared, dtype, device)
    x = rows_without_ties(part, rows, dtype, device)
    assert len(x) == rows
    few = rows * num_shared <= MAX_SHARED_PAIRS
    assert part.num_shared(x) == (num_shared if x.is_cuda and few else 0)
    want = with_shared_by_definition(part, x)
    joins(monkeypatch)
    assert part.num_shared(x) == (num_shared if few else 0)
    residual = torch.randn_like(x)
    out, left = part(x, residual)
    assert left is residual and isinstance(out, ExpertOutputs if few else Tensor)
    for got in (combined(out), combined(part(x, None)[0]), combined(part.apart(x))):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double().cpu(), want, rtol=ERRORS[dtype], atol=ERRORS[dtype])


def test_shared_experts_that_have_launches_of_their_own(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sizes, strides, dtypes, biases, activations and reductions than those of the routed experts."""
    joins(monkeypatch)
    part, x = moe_of("softmax", 2, torch.bfloat16, device), torch.randn(3, 64, device=device).bfloat16()
    shared = part.shared
    assert shared is not None and part.num_shared(x) == 2

    def linears(inner: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Linear]:
        shapes = {"gate_up": (2 * inner, 64), "down": (64, inner)}
        return {name: Linear(torch.randn(shape, device=device).to(dtype), None) for name, shape in shapes.items()}

    off_16_bytes = torch.zeros(64, 260, device=device).bfloat16()[:, :256]
    changes: tuple[dict[str, Any], ...] = (
        {"activation": nn.GELU()},
        {"limit": 7.0},
        {"down": shared.down._replace(bias=torch.zeros(64, device=device).bfloat16())},
        {"down": shared.down._replace(weight=off_16_bytes)},
        {"down": shared.down._replace(reduction=Twice())},
        linears(192),
        linears(64),
        linears(256, torch.float16),
    )
    for change in changes:
        assert dataclasses.replace(part, shared=dataclasses.replace(shared, **change)).num_shared(x) == 0
    assert dataclasses.replace(part, router=lambda x: part.router(x)).num_shared(x) == 0
    biased = dataclasses.replace(part.experts, down_bias=torch.zeros(12, 64, device=device).bfloat16())
    assert dataclasses.replace(part, experts=biased).num_shared(x) == 0
    too_many = dataclasses.replace(part.router, top_k=31)  # type: ignore[type-var]
    assert dataclasses.replace(part, router=too_many).num_shared(x) == 0
    assert dataclasses.replace(part, shared=None).num_shared(x) == 0


class Twice(Reduction):
    """Two ranks with equal partial sums."""

    size = 2

    def sum(self, x: Tensor) -> Tensor:
        return 2 * x

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], -1)


def test_shared_expert_in_the_launches_of_routed_ones_is_reduced_with_them(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    joins(monkeypatch)
    whole, x = moe_of("sigmoid", 1, torch.bfloat16, device), torch.randn(5, 64, device=device).bfloat16()
    assert whole.shared is not None
    reduction = Twice()
    divided = MoE(
        whole.router,
        dataclasses.replace(whole.experts, reduction=reduction),
        dataclasses.replace(whole.shared, down=whole.shared.down._replace(reduction=reduction)),
    )
    assert divided.num_shared(x) == 1
    out, residual = divided(x, x)
    assert isinstance(out, PartialSum) and out.reduction is reduction and residual is x
    assert torch.equal(out.partial, combined(whole(x, None)[0]))


@pytest.mark.parametrize(
    ("model_type", "num_shared", "changes"),
    [
        ("dots1", 2, {"hidden_size": 128}),
        ("qwen2_moe", 2, {"shared_expert_intermediate_size": 128}),
        ("granitemoeshared", 1, {"intermediate_size": 64, "shared_intermediate_size": 64}),
        ("ernie4_5_moe", 0, {"hidden_size": 128}),
    ],
)
def test_shared_experts_of_models_in_the_launches_of_routed_ones(
    model_type: str,
    num_shared: int,
    changes: dict[str, Any],
    tmp_path: Path,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ERNIE routes without `moe_route`."""
    folder = stirred(save_random_model(tmp_path / "model", model_type, initializer_range=0.1, **changes))
    options = ModelOptions(max_len=64, num_pages=8, page_size=8, dtype=torch.bfloat16, device=device)
    layers = open_language_model(str(folder), options).decoder.layers
    parts = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, MoE)]
    assert parts
    joins(monkeypatch)
    for part in parts:
        x = torch.randn(6, part.experts.gate_up.shape[1], device=device).bfloat16()
        assert part.num_shared(x) == num_shared
        got, want = (combined(out).double() for out in (part(x, None)[0], part.apart(x)))
        errors = (got - want).norm(dim=1) / want.norm(dim=1)
        assert errors.median() <= 1e-2  # rows with a tie may go to other experts


# --- choices


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("rows", [0, 1, MAX_ROUTER_ROWS, MAX_ROUTER_ROWS + 1])
def test_router_logits_are_not_rounded(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = (torch.randn(n, 256, device=device).to(dtype) for n in (rows, 60))
    logits = router_logits(x, weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-4)


def test_the_softmax_router_takes_the_most_probable(device: torch.device) -> None:
    scores = Linear(torch.randn(9, 16, device=device), torch.randn(9, device=device))
    x = torch.randn(5, 16, device=device)
    odds = (x.double() @ scores.weight.double().T + scores.bias.double()).softmax(-1)  # type: ignore[union-attr]
    for normalised in (False, True):
        chosen = SoftmaxRouter.of(scores, 4, normalised)(x)
        assert torch.equal(chosen.topk_ids, odds.argsort(-1, descending=True)[:, :4])
        want = odds.gather(1, chosen.topk_ids)
        want = want / want.sum(-1, keepdim=True) if normalised else want
        torch.testing.assert_close(chosen.topk_weights.double(), want, rtol=1e-5, atol=1e-6)
        again = routing_of(chosen.topk_ids, chosen.topk_weights, 9)
        assert torch.equal(chosen.expert_ends, again.expert_ends)
        of_pairs = chosen.topk_ids.flatten()
        assert torch.equal(of_pairs[chosen.sorted_pairs], of_pairs[again.sorted_pairs])


@pytest.mark.parametrize(("groups", "groups_taken"), [(1, 1), (4, 2), (3, 1)])
@pytest.mark.parametrize("normalised", [False, True])
def test_the_sigmoid_router_takes_the_best_of_the_best_groups(
    groups: int, groups_taken: int, normalised: bool, device: torch.device
) -> None:
    weight, correction, x = (torch.randn(*shape, device=device) for shape in ((12, 16), (12,), (6, 16)))
    chosen = SigmoidRouter(weight, correction, 3, groups, groups_taken, normalised, 1.5)(x)
    scores = (x.double() @ weight.double().T).sigmoid()
    corrected = (scores + correction).tolist()
    size = 12 // groups
    for row, experts_of_row in enumerate(chosen.topk_ids.tolist()):
        best_two = {g: sum(sorted(corrected[row][g * size : (g + 1) * size])[-2:]) for g in range(groups)}
        best = sorted(best_two, key=best_two.__getitem__)[-groups_taken:]
        allowed = [expert for expert in range(12) if expert // size in best]
        assert set(experts_of_row) == set(sorted(allowed, key=corrected[row].__getitem__)[-3:])
        shares = scores[row, experts_of_row]
        shares = 1.5 * (shares / shares.sum() if normalised else shares)
        torch.testing.assert_close(chosen.topk_weights[row].double(), shares, rtol=1e-5, atol=1e-6)


# --- models


def stirred(folder: Path) -> Path:
    """Randomize norms, biases, corrections, sinks and routers of a model."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 1 or not tensor.any():
            tensors[name] = tensor + 0.3 * torch.randn_like(tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("model_type", "algorithm"), covering(EXPERTS, ["none", "ngram", "standalone"]))
def test_greedy_text_is_that_of_transformers(
    model_type: str, algorithm: str, tmp_path: Path, device: torch.device
) -> None:
    """The draft is the model itself: nearly all that it says is accepted."""
    # Wider weights magnify what the order of sums brings, until a row takes another expert.
    folder = stirred(save_random_model(tmp_path / "model", model_type, initializer_range=0.1))
    drafts = {"ngram": Ngram(num_nodes=9), "standalone": Standalone(folder, num_steps=3, topk=2, num_nodes=11)}
    options: dict[str, Any] = {"max_len": 256, "num_slots": 4, "page_size": 3, "dtype": torch.float32}
    engine = Engine(folder, draft=drafts.get(algorithm), adaptive=False, device=device, **options)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = random_prompts(5)
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=20))
    comparison = Comparison(reference)
    for prompt, output, want in zip(prompts, outputs, greedy_by_transformers(reference, prompts, 20), strict=True):
        comparison.check(prompt, output.tokens, want)
    assert len(comparison.near_ties) <= 1
    if algorithm == "standalone":
        assert sum(o.stats.accepted for o in outputs) > 0.7 * sum(o.stats.rounds for o in outputs) * 3


def test_a_window_of_all_layers(tmp_path: Path, device: torch.device) -> None:
    folder = save_random_model(tmp_path / "model", "qwen3_moe", use_sliding_window=True, sliding_window=11)
    engine = Engine(folder, draft=Ngram(num_nodes=9), max_len=256, dtype=torch.float32, device=device)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    comparison = Comparison(reference)
    prompts = random_prompts(3)
    for prompt, output in zip(prompts, engine.generate(prompts, SamplingParams(max_new_tokens=20)), strict=True):
        comparison.check(prompt, output.tokens, greedy_by_transformers(reference, [prompt], 20)[0])
    assert len(comparison.near_ties) <= 1


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a weight [experts, in, out] to MXFP4.

    Return blocks [experts, out, in / 32, 16] uint8, scales [experts, out, in / 32] uint8, and the dequantized weight.
    """
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    rows = weight.mT.unflatten(2, (-1, 32))
    exponents = rows.abs().amax(-1).clamp(min=1e-6).div(6).log2().ceil()
    scaled = rows / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - values).abs().argmin(-1)
    means = values[codes] * scaled.sign() * exponents.exp2()[..., None]
    bits = (codes | (scaled < 0).long() << 3).to(torch.uint8)
    return bits[..., ::2] | bits[..., 1::2] << 4, (exponents + 127).to(torch.uint8), means.flatten(2).mT


def test_experts_in_mxfp4(tmp_path: Path, device: torch.device) -> None:
    """As gpt-oss is published: transformers widens them."""
    folder = save_random_model(tmp_path / "model", "gpt_oss", num_hidden_layers=2)
    tensors, twin = load_file(folder / "model.safetensors"), {}
    for name in list(tensors):
        if name.endswith(("gate_up_proj", "down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"], twin[name] = mxfp4(tensors.pop(name))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference.load_state_dict(reference.state_dict() | twin)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (folder / "config.json").write_text(json.dumps(config))
    engine = Engine(folder, draft=Ngram(num_nodes=9), max_len=256, dtype=torch.float32, device=device)
    comparison = Comparison(reference)
    prompts = random_prompts(3)
    for prompt, output in zip(prompts, engine.generate(prompts, SamplingParams(max_new_tokens=20)), strict=True):
        comparison.check(prompt, output.tokens, greedy_by_transformers(reference, [prompt], 20)[0])
    assert len(comparison.near_ties) <= 1


def test_synthetic_moe_continues_the_text() -> None:
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    text = SyntheticText.of(256, 128)
    model = synthetic_causal_lm(config, text, device=torch.device("cpu"), dtype=torch.float32)
    (output,) = Engine(model, max_len=128, device="cpu").generate([text.tokens(0, 8)], SamplingParams(20))
    assert output.tokens == text.tokens(8, 20)


def test_batch_invariance_is_refused_with_experts(tmp_path: Path) -> None:
    folder = save_random_model(tmp_path / "model", "mixtral")
    with pytest.raises(ValueError) as error:
        Engine(folder, batch_invariant=True, max_len=64, device="cpu")
    assert str(error.value) == (
        "Engine: batch_invariant is set, expected not with mixtral, "
        "whose experts multiply the rows of several requests together"
    )


def test_some_of_the_rows_that_experts_made() -> None:
    made = ExpertOutputs(torch.randn(5 * 3, 4), torch.rand(5, 3))
    places = torch.tensor([4, 0, 0])
    torch.testing.assert_close(select_rows(places, made).combine(), made.combine()[places])
    plain = torch.randn(5, 4)
    assert torch.equal(select_rows(places, plain), plain[places])
