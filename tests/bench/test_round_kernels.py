"""`bench round --profile`: kernels of the round that takes most of a trace, and passes of hybrids that are timed alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec_kernels.cli import main
from specdec_kernels.models.backends.native import CausalLM
from specdec_kernels.models.options import ModelOptions
from specdec_kernels.synthetic.models import SyntheticText, synthetic_causal_lm
from specdec_kernels.synthetic.shapes import draft_vocab_of, shape_config

kernels = pytest.importorskip("specdec_kernels.bench.engine.kernels", reason="bench/ is not beside the package here")


def event(correlation: int, start: float, duration: float, name: str, category: str = "kernel") -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": start, "dur": duration, "args": {"correlation": correlation}}


def test_kernels_are_those_of_the_graph_that_is_launched_most_often() -> None:
    def launch(correlation: int, start: float, count: int) -> list[dict[str, Any]]:
        one = [
            event(correlation, start + 3 * i, 2, "void (anonymous namespace)::a<f<int>(1)>(int)") for i in range(count)
        ]
        return [*one, event(correlation, start + 1, 4, "Memcpy DtoD", "gpu_memcpy")]

    others = [{"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 9, "args": {"correlation": 1}}]
    others += [event(900 + i, 1000 + i, 500, "b") for i in range(9)]  # no graph
    trace = [*launch(1, 0, 10), *launch(2, 100, 80), *launch(3, 400, 10), *others, {"ph": "M"}]
    found = kernels.profile_of(trace)
    assert (found.launches, found.microseconds, found.idle) == (2, 29, 8)
    # The copy from 1 to 5 begins while the first kernel runs, and the second runs meanwhile.
    assert {(k.name, k.launches) for k in found.kernels} == {("a<f<int>(1)>", 10), ("Memcpy DtoD", 1)}
    assert sum(k.microseconds for k in found.kernels) == 21
    assert [
        round(us, 3) for _, us in kernels.own_times([event(1, 0, 4, "a"), event(1, 1, 9, "b"), event(1, 12, 1, "c")])
    ] == [4, 6, 1]
    assert kernels.profile_of(others) is None


def test_profile_is_refused_where_no_graph_is_captured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "round", "--device", "cpu", "--profile"]) == 2
    assert "--profile is set, expected only with rounds captured on a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(("batch", "nodes"), [(1, 1), (2, 16)])
def test_passes_of_a_hybrid_can_be_repeated(batch: int, nodes: int) -> None:
    forward = pytest.importorskip("specdec_kernels.bench.engine.forward")
    config, cpu = shape_config("tiny-hybrid", 4), torch.device("cpu")
    text = SyntheticText.of(config.vocab_size, draft_vocab_of(config))
    model = synthetic_causal_lm(config, text, device=cpu, dtype=torch.float32)
    sizes = {"num_slots": 2, "max_nodes": 16, "accept_width": forward.ACCEPTED}
    options = ModelOptions(max_len=64, num_pages=8, page_size=16, dtype=torch.float32, device=cpu, **sizes)
    target = CausalLM(model, options)
    whole = forward.Pass(target, batch, nodes, 20, cpu)
    with torch.inference_mode():
        assert all(whole().isfinite().all() for _ in range(3))
    assert target.states is not None
    assert target.states.paths.num_nodes.tolist() == [min(nodes, 4)] * batch + [0] * (2 - batch)


@pytest.mark.parametrize(("shape", "per_layer"), [("tiny", 4), ("tiny-hybrid", None), ("tiny-latent", None)])
def test_gemms_alone_are_those_of_layers_of_attention_and_an_mlp(shape: str, per_layer: int | None) -> None:
    forward = pytest.importorskip("specdec_kernels.bench.engine.forward")
    config, cpu = shape_config(shape), torch.device("cpu")
    text = SyntheticText.of(config.vocab_size, draft_vocab_of(config))
    model = synthetic_causal_lm(config, text, device=cpu, dtype=torch.float32)
    sizes = {"num_slots": 2, "max_nodes": 4, "accept_width": forward.ACCEPTED}
    target = CausalLM(
        model, ModelOptions(max_len=64, num_pages=8, page_size=16, dtype=torch.float32, device=cpu, **sizes)
    )
    linears = forward.dense_linears(target)
    if per_layer is None:
        assert linears is None
        return
    assert len(linears) == per_layer * config.num_hidden_layers
    with torch.inference_mode():
        assert forward.Linears(target, linears, 3)().shape == (3, config.vocab_size)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("specdec::layers::wgmma_small_m_gemm_kernel<specdec::BFloat16, 64>", "gemm"),
        ("specdec::layers::small_m_bmm_kernel<specdec::BFloat16, true, 1>", "gemm"),
        ("nvjet_sm90_tst_128x128_64x6_2x1_v_badd_TNT", "gemm"),
        ("specdec::attention::wgmma_kernel<specdec::attention::Rows>", "tree_attention"),
        ("specdec::mla::wgmma_kernel<specdec::mla::Tile>", "tree_attention"),
        ("specdec::recurrent::tree_pass_kernel<specdec::BFloat16>", "tree_recurrence"),
        ("specdec::recurrent::commit_conv1d_kernel<specdec::Pack>", "tree_conv1d"),
        ("at::native::elementwise_kernel<128, 4>", "elementwise"),
    ],
)
def test_kind_of_a_kernel_in_a_forward_pass(kernel: str, kind: str) -> None:
    forward = pytest.importorskip("specdec_kernels.bench.engine.forward")
    assert forward.kind_of(kernel) == kind
