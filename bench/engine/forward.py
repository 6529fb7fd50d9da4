"""The target's forward pass alone, beside its matrix products alone: what is left to gain in a round.

    python -m specdec_kernels.bench.engine.forward [--shape qwen3-8b] [--weights fp8] [--rows 1x1,4x1] [--prefix 430]
        [--json FILE]

Rows are requests x nodes. Products of weights in 16 bits are cuBLAS's, of others those of the pass. Every time is of
one CUDA graph, weights cold (a pass reads more than any cache holds). With --kernels, the time of its kernels by kind,
from the profiler: one that starts while another still runs counts its wait as well.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specdec_kernels.cli.table import print_table
from specdec_kernels.models.backends.native import CausalLM
from specdec_kernels.models.layers.paged_batch import PagedBatch
from specdec_kernels.models.options import ModelOptions
from specdec_kernels.synthetic.models import PlantedText, plant_causal_lm
from specdec_kernels.synthetic.shapes import SHAPES, draft_vocab_of, shape_config

from ..ops.stored_weights import STORED, store_layers
from ..ops.timing import replay_seconds, times_of

ROWS = "1x1,4x1,1x6,16x1,1x32,64x1,16x6,64x6,16x32,64x32"
PAGE_SIZE = 16
# What a kernel's name says about its kind, the first that fits; others count as products.
KINDS = {
    "tree_attention": ("attention", "merge_parts", "wgmma_"),
    "add_rms_norm": ("add_rms_norm",),
    "quantize_fp8": ("quantize_fp8", "round_groups"),
    "rope_qkv_write_kv": ("rope_qkv_write_kv",),
    "silu_and_mul": ("silu_and_mul",),
    "elementwise": ("elementwise", "index", "embedding", "cat", "copy", "Memcpy", "Memset", "reduce"),
}


class Pass:
    """One forward pass with logits, of a batch of trees behind a prefix, on inputs that stay where they are."""

    def __init__(self, target: CausalLM, batch: int, nodes: int, prefix: int, device: torch.device) -> None:
        def ints(*values: Any, **options: Any) -> Tensor:
            return torch.tensor(*values, dtype=torch.int32, device=device, **options)

        pages = -(-(prefix + nodes) // PAGE_SIZE)
        self.target = target
        self.tokens = torch.randint(target.config.vocab_size, (batch, nodes), device=device).int()
        self.positions = prefix + ints([list(range(nodes))] * batch)
        self.rows = PagedBatch(
            slots=torch.arange(batch, device=device).int(),
            page_table=torch.randperm(batch * pages, device=device).int().view(batch, pages),
            prefix_lens=ints([prefix] * batch),
            tail_len=nodes,
            mask=None
            if nodes == 1
            else torch.tensor([[[2**i - 1 if i < 64 else -1] for i in range(1, nodes + 1)]] * batch, device=device),
            num_valid=ints([nodes] * batch),
            status=ints([0] * batch),
        )

    def __call__(self) -> Tensor:
        return self.target.logits(self.target.forward(self.tokens, self.positions, self.rows).hidden)


class Products:
    """The matrix products of that pass alone, each on the output of none."""

    def __init__(self, target: CausalLM, rows: int) -> None:
        weight = target.embedding.weight
        parts = [(layer.attention, layer.feed_forward) for layer in target.decoder.layers]
        self.products = [p for a, f in parts for p in (a.qkv, a.out, f.gate_up, f.down)]
        self.head = target.decoder.head
        widths = {p.weight.shape[1] for p in self.products} | {weight.shape[1]}
        self.inputs = {width: torch.randn(rows, width, device=weight.device, dtype=weight.dtype) for width in widths}

    def __call__(self) -> Tensor:
        for product in [*self.products, self.head.linear]:
            x, weight = self.inputs[product.weight.shape[1]], product.weight
            out = functional.linear(x, weight) if isinstance(weight, Tensor) else product(x)
        return out


def kinds_of(call: Any) -> dict[str, float]:
    """Microseconds of a captured call by kind of kernel."""
    from torch.profiler import ProfilerActivity, profile

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    for event in profiler.events() or ():
        name = event.name.lower()
        kind = next((kind for kind, words in KINDS.items() if any(word.lower() in name for word in words)), "products")
        times[kind] += event.device_time
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--weights", choices=STORED, help="how those of the layers are stored; none: in 16 bits")
    parser.add_argument("--rows", default=ROWS, help="requests x nodes, several with commas")
    parser.add_argument("--prefix", type=int, default=430)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()

    device, dtype = torch.device("cuda"), torch.bfloat16
    sizes = [(int(b), int(n)) for b, _, n in (item.partition("x") for item in args.rows.split(","))]
    config = shape_config(args.shape)
    text = PlantedText.of(config.vocab_size, draft_vocab_of(config))
    model = plant_causal_lm(config, text, device=device, dtype=dtype)
    if args.weights is not None:
        store_layers(model, args.weights)
    options = ModelOptions(
        max_len=args.prefix + 64,
        num_pages=max(b * -(-(args.prefix + n) // PAGE_SIZE) for b, n in sizes),
        page_size=PAGE_SIZE,
        dtype=dtype,
        device=device,
    )
    target = CausalLM(model, options)
    results = []
    with torch.inference_mode():
        for batch, nodes in sizes:
            whole = Pass(target, batch, nodes, args.prefix, device)
            products = times_of(replay_seconds([Products(target, batch * nodes)])).median * 1e3
            forward = times_of(replay_seconds([whole])).median * 1e3
            kinds = {kind: us * 1e-3 for kind, us in kinds_of(whole).items()} if args.kernels else {}
            results.append({"batch": batch, "nodes": nodes, "products_ms": products, "forward_ms": forward, **kinds})
    columns = list(dict.fromkeys(name for result in results for name in result))
    print_table(
        columns,
        [[f"{r.get(c, 0):.3f}" if c not in ("batch", "nodes") else str(r[c]) for c in columns] for r in results],
    )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
