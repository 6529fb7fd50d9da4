"""The target's forward pass and its GEMMs alone, the lower bound of a round (`specdec bench forward`).

Rows are requests x nodes. GEMMs of 16-bit weights are cuBLAS's, those of other weights are the pass's own. Every time
is that of one CUDA graph, with cold weights (a pass reads more than any cache holds). `kernels` adds the time of the
kernels by kind, from the profiler: while a kernel runs that started before, another does not count.

The GEMMs alone are timed where all layers have attention and a gated MLP, not with experts or recurrent layers. A pass
of a hybrid adds the path that the pass before left pending to the recurrent states: ACCEPTED nodes of a tree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specdec_kernels.models.backends.native import CausalLM
from specdec_kernels.models.layers.attention import Attention
from specdec_kernels.models.layers.linear import Linear
from specdec_kernels.models.layers.mlp import GatedMLP
from specdec_kernels.models.layers.paged_batch import PagedBatch
from specdec_kernels.models.options import ModelOptions
from specdec_kernels.synthetic.models import SyntheticText, synthetic_causal_lm
from specdec_kernels.synthetic.shapes import draft_vocab_of, shape_config

from ..ops.stored_weights import store_layers
from ..ops.timing import replay_seconds, times_of
from .kernels import profile_rounds

PAGE_SIZE = 16
ACCEPTED = 4  # nodes of a tree
# Parts of a kernel's name by its kind, the first that fits; other kernels count as GEMMs.
KINDS = {
    "gemm": ("small_m_gemm", "small_m_bmm", "moe_grouped_gemm"),
    "tree_attention": ("attention", "mla::"),
    "add_rms_norm": ("add_rms_norm",),
    "quantize_fp8": ("quantize_",),
    "rope_qkv_write_kv": ("rope_qkv_write_kv",),
    "silu_and_mul": ("silu_and_mul",),
    "tree_conv1d": ("conv1d",),
    "compute_gates": ("compute_gates",),
    "gated_rms_norm": ("gated_rms_norm",),
    "tree_recurrence": ("recurrence", "recurrent::"),
    "elementwise": ("elementwise", "index", "embedding", "cat", "copy", "Memcpy", "Memset", "reduce"),
}


class Pass:
    """A forward pass with logits, of a batch of trees after a prefix, on fixed inputs."""

    def __init__(self, target: CausalLM, batch: int, nodes: int, prefix: int, device: torch.device) -> None:
        def ints(values: list[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        pages = -(-(prefix + nodes) // PAGE_SIZE)
        num_slots = batch if target.states is None else target.states.num_slots
        table = torch.randperm(batch * pages, device=device).view(batch, pages)
        self.target = target
        self.tokens = torch.randint(target.config.vocab_size, (batch, nodes), device=device).int()
        self.positions = prefix + ints([list(range(nodes))] * batch)
        self.rows = PagedBatch(
            slots=torch.arange(batch, device=device).int(),
            page_table=functional.pad(table.int(), (0, 0, 0, num_slots - batch)),
            prefix_lens=ints([prefix] * num_slots),
            tail_len=nodes,
            mask=None
            if nodes == 1 and target.states is None
            else torch.tensor([[[2**i - 1 if i < 64 else -1] for i in range(1, nodes + 1)]] * batch, device=device),
            num_valid=ints([nodes] * batch),
            status=ints([0] * num_slots),
        )
        self.path, self.accepted = ints([list(range(ACCEPTED))] * batch), ints([min(nodes, ACCEPTED)] * batch)

    def __call__(self) -> Tensor:
        hidden = self.target.forward(self.tokens, self.positions, self.rows).hidden
        if self.target.states is not None:
            assert self.rows.status is not None
            self.target.states.move(self.path, self.accepted, slots=self.rows.slots, status=self.rows.status)
        return self.target.logits(hidden)


def dense_linears(target: CausalLM) -> list[Linear] | None:
    """Return the linears of all layers; None: some layer has other parts than attention and a gated MLP."""
    linears: list[Linear] = []
    for layer in target.decoder.layers:
        mixer, mlp = layer.mixer, layer.feed_forward
        if not isinstance(mixer, Attention) or mixer.gate is not None or not isinstance(mixer.qkv, Linear):
            return None
        if not isinstance(mlp, GatedMLP):
            return None
        linears += [mixer.qkv, mixer.out, mlp.gate_up, mlp.down]
    return linears


class Linears:
    """The linear layers of that pass alone, each on an input of its own."""

    def __init__(self, target: CausalLM, linears: list[Linear], rows: int) -> None:
        weight = target.embedding.weight
        self.linears = linears
        self.head = target.decoder.head
        widths = {p.weight.shape[1] for p in self.linears} | {weight.shape[1]}
        self.inputs = {width: torch.randn(rows, width, device=weight.device, dtype=weight.dtype) for width in widths}

    def __call__(self) -> Tensor:
        for linear in [*self.linears, self.head.linear]:
            x, weight = self.inputs[linear.weight.shape[1]], linear.weight
            out = functional.linear(x, weight) if isinstance(weight, Tensor) else linear(x)
        return out


def kinds_of(call: Any) -> dict[str, float]:
    """Return microseconds of a captured call by kind of kernel."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    profile = profile_rounds(graph.replay)
    times: dict[str, float] = defaultdict(float)
    for kernel in profile.kernels if profile is not None else ():
        times[kind_of(kernel.name)] += kernel.microseconds
    return times


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word.lower() in name for word in words)), "gemm")


@torch.inference_mode()
def measure_forward(
    shape: str, weights: str | None, sizes: Sequence[tuple[int, int]], prefix: int, kernels: bool
) -> list[dict[str, float]]:
    """Return milliseconds of the GEMMs and of the pass, for each number of requests and nodes in `sizes`.

    `weights` is how the layers' weights are stored (None: in 16 bits), `prefix` the number of tokens before the trees.
    `kernels` adds milliseconds by kind of kernel.
    """
    device, dtype = torch.device("cuda"), torch.bfloat16
    config = shape_config(shape)
    text = SyntheticText.of(config.vocab_size, draft_vocab_of(config))
    model = synthetic_causal_lm(config, text, device=device, dtype=dtype)
    if weights is not None:
        store_layers(model, weights)
    options = ModelOptions(
        max_len=prefix + 64,
        num_pages=max(b * -(-(prefix + n) // PAGE_SIZE) for b, n in sizes),
        page_size=PAGE_SIZE,
        dtype=dtype,
        device=device,
        num_slots=max(batch for batch, _ in sizes),
        max_nodes=max(nodes for _, nodes in sizes),
        accept_width=ACCEPTED,
    )
    target = CausalLM(model, options)
    linears = dense_linears(target)
    results = []
    for batch, nodes in sizes:
        whole = Pass(target, batch, nodes, prefix, device)
        times = {"forward_ms": times_of(replay_seconds([whole])).median * 1e3}
        if linears is not None:
            times["gemm_ms"] = times_of(replay_seconds([Linears(target, linears, batch * nodes)])).median * 1e3
        kinds = {kind: us * 1e-3 for kind, us in kinds_of(whole).items()} if kernels else {}
        results.append({"batch": batch, "nodes": nodes, **times, **kinds})
    return results
