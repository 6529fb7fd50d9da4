"""Record what vLLM's MTP layers draft on a CPU: tests/models/mtp_golden.json.

    PYTHONPATH=VLLM_SITE:tests/support python tests/support/record_mtp.py FILE [FAMILY ...]

Families that are named replace theirs in the file or are added; without names all are recorded.

vLLM's own classes load the checkpoint, by their names of its tensors, and compute everything but attention's softmax and
experts' GEMMs, whose kernels need a GPU: plain torch stands in their place. Latent attention is not absorbed
(`use_mla` is False). Drafts are made as its proposer makes them
(`llm_base_proposer.py`): rows of the prompt at once, and then a row for each draft, which reads the last row's state.
Each layer of a chain has all rows, one token later than the layer before, as SGLang's worker runs them
(`multi_layer_eagle_worker_v2.py`); vLLM's proposer gives rows of the prompt to the first layer alone.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from golden_mtp import GOLDEN, HIDDEN, SIZES, STEPS, TOKENS, VOCAB, GoldenMtp
from torch import Tensor, nn


class PlainAttention(nn.Module):
    """Causal attention over all rows so far, or over the last ones of a sliding window."""

    def __init__(
        self,
        heads: int,
        head_dim: int,
        scale: float,
        num_kv_heads: int | None = None,
        per_layer_sliding_window: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.window = per_layer_sliding_window
        self.heads, self.kv_heads = heads, num_kv_heads or heads
        self.head_dim, self.scale = head_dim, scale
        self.keys = torch.empty(self.kv_heads, 0, head_dim)
        self.values = torch.empty(self.kv_heads, 0, head_dim)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, output_shape: Any = None) -> Tensor:
        rows = len(query)
        q, k, v = (x.view(rows, -1, self.head_dim).transpose(0, 1) for x in (query, key, value))
        self.keys, self.values = torch.cat([self.keys, k], 1), torch.cat([self.values, v], 1)
        total, group = self.keys.shape[1], self.heads // self.kv_heads
        scores = q @ self.keys.repeat_interleave(group, 0).mT * self.scale
        hidden = torch.ones(rows, total, dtype=torch.bool).triu(total - rows + 1)
        if self.window is not None:
            hidden |= torch.ones(rows, total, dtype=torch.bool).tril(total - rows - self.window)
        out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ self.values.repeat_interleave(group, 0)
        return out.transpose(0, 1).reshape(rows, -1)


MODULES = {  # of vLLM's models: the file and the class of an MTP layer
    "qwen3_next": ("qwen3_next_mtp", "Qwen3NextMTP"),
    "qwen3_5": ("qwen3_5_mtp", "Qwen3_5MTP"),
    "qwen3_5_moe": ("qwen3_5_mtp", "Qwen3_5MoeMTP"),
    "nemotron_h": ("nemotron_h_mtp", "NemotronHMTP"),
    "deepseek_v3": ("deepseek_mtp", "DeepSeekMTP"),
    "glm4_moe_lite": ("glm4_moe_lite_mtp", "Glm4MoeLiteMTP"),
    "mimo": ("mimo_mtp", "MiMoMTP"),
    "ernie": ("ernie_mtp", "ErnieMTP"),
    "hy_v3": ("hy_v3_mtp", "HYV3MTP"),
    "step3p5": ("step3p5_mtp", "Step3p5MTP"),
}


def start_vllm() -> Any:
    """Return vLLM's config for modules on the CPU, in its own groups of one process."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms.current_platform = CpuPlatform()
    from vllm.config import CompilationConfig, DeviceConfig, VllmConfig
    from vllm.config.compilation import CompilationMode

    compilation = CompilationConfig(mode=CompilationMode.NONE, custom_ops=["none"])
    return VllmConfig(compilation_config=compilation, device_config=DeviceConfig(device="cpu"))


def start_groups() -> None:
    from vllm.distributed import parallel_state

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    parallel_state.init_distributed_environment(1, 0, "env://", 0, backend="gloo")
    parallel_state.initialize_model_parallel(1, 1, backend="gloo")


def use_plain_torch() -> None:
    """Replace the kernels of vLLM's CPU module, which this build of vLLM does not have."""
    import vllm.model_executor.layers.attention as layers
    import vllm.model_executor.layers.utils as linears
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    layers.Attention = PlainAttention
    VllmConfig.with_hf_config = lambda self, _: self  # the draft's config is the target's
    linears.check_cpu_sgl_kernel = lambda *_: False
    config.current_platform = SimpleNamespace(is_cuda_alike=lambda: True)  # else it refuses experts without gates
    cpu_moe.cpu_prepack_moe_weight = lambda weight, _: weight
    cpu_moe.cpu_fused_moe = plain_experts
    for question in ("_supports_no_act_and_mul", "_supports_activation"):
        setattr(cpu_moe.CPUUnquantizedExperts, question, staticmethod(lambda *_: True))


def plain_experts(
    out: Tensor, x: Tensor, w13: Tensor, w2: Tensor, b13: Any, b2: Any, weights: Tensor, ids: Tensor, act: str, *_: Any
) -> None:
    """Write the weighted sums [rows, H] of the chosen experts' outputs."""
    assert b13 is None and b2 is None
    for row, (state, chosen, factors) in enumerate(zip(x, ids.long(), weights, strict=True)):
        hidden = w13[chosen] @ state
        if act == "silu":
            gate, up = hidden.chunk(2, -1)
            hidden = nn.functional.silu(gate) * up
        else:
            assert act == "relu2_no_mul", act
            hidden = hidden.relu().square()
        out[row] = (factors[:, None] * torch.einsum("ehw,ew->eh", w2[chosen], hidden)).sum(0)


def model_of(name: str, case: GoldenMtp, vllm_config: Any) -> tuple[Any, Any]:
    """Return vLLM's model with the checkpoint's tensors, and the target's final norm."""
    from transformers import AutoConfig, Qwen2Config
    from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT, RotaryEmbedding
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    values = SIZES | case.config
    named = {"mimo": Qwen2Config, "step3p5": Step3p7TextConfig}
    config = named[name](**values) if name in named else AutoConfig.for_model(case.model_type, **values)
    model_config: Any = SimpleNamespace(
        hf_config=config, hf_text_config=config, dtype=torch.float32, head_dtype=torch.float32, multimodal_config=None,
        is_moe=True, quantization=None, enforce_eager=True, max_model_len=128, model=name,
        word_embeddings_untied_by_checkpoint=True, use_mla=False,
    )  # fmt: skip
    vllm_config.model_config = model_config
    vllm_config.speculative_config = SimpleNamespace(draft_model_config=model_config, target_model_config=None)
    vllm_config.compilation_config.static_forward_context.clear()  # of the model before
    _ROPE_DICT.clear()  # the same, which ERNIE's has changed
    file, kind = MODULES[name]
    model = getattr(import_module(f"vllm.model_executor.models.{file}"), kind)(vllm_config=vllm_config)
    tensors = case.tensors
    model.load_weights(tensors.items())
    if name == "nemotron_h":  # its layer gets both from its target
        model.model.embed_tokens = VocabParallelEmbedding(VOCAB, HIDDEN)
        model.lm_head = ParallelLMHead(VOCAB, HIDDEN)
        for module, key in ((model.model.embed_tokens, case.embedding), (model.lm_head, "lm_head")):
            module.weight.data[:VOCAB] = tensors[f"{key}.weight"]
    if name == "ernie":  # its layer rotates halves here, where its target and SGLang's layer rotate neighbors
        for module in model.modules():
            if isinstance(module, RotaryEmbedding):
                module.is_neox_style = False
    process_weights_after_loading(model, model_config, torch.device("cpu"))
    norm = norm_of(name)(config.hidden_size, eps=1e-6)
    norm.weight.data.copy_(tensors[f"{case.final_norm}.weight"])
    return model, norm


def norm_of(name: str) -> Any:
    """Return the class of the target's final norm."""
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    return GemmaRMSNorm if name.startswith("qwen3") else RMSNorm


@torch.no_grad()
def drafted(name: str, vllm_config: Any) -> dict[str, Any]:
    """Return what a family's layer drafts, with log-probabilities."""
    from vllm.forward_context import set_forward_context

    case = GOLDEN[name]
    model, norm = model_of(name, case, vllm_config)
    rows = len(TOKENS) - 1
    states = case.states[:-1] if name == "step3p5" else norm(case.states)[:-1]  # its target passes them on before
    tokens, positions = torch.tensor(TOKENS[1:]), torch.arange(rows)
    chain, logprobs = [], []
    for step in range(STEPS):
        options = {"spec_step_idx": step} if case.is_chain else {}
        with set_forward_context(None, vllm_config):
            out = model(input_ids=tokens, positions=positions, hidden_states=states, **options)
        scored, states = (out, out) if isinstance(out, Tensor) else out  # DeepSeek's: before and after the final norm
        scores = model.compute_logits(scored[-1:], **options)[0].float().log_softmax(-1)
        chain.append(int(scores.argmax()))
        logprobs.append([round(float(score), 4) for score in scores])
        if case.is_chain:
            tokens = torch.cat([tokens[1:], torch.tensor(chain[-1:])])
        else:
            tokens, positions, states = torch.tensor(chain[-1:]), torch.tensor([rows + step]), states[-1:]
    return {"torch": torch.__version__, "drafted": chain, "logprobs": logprobs}


def main(file: Path, families: list[str]) -> None:
    kept = json.loads(file.read_text())["families"] if families else {}
    vllm_config = start_vllm()
    from vllm import __version__
    from vllm.config import set_current_vllm_config

    use_plain_torch()
    with set_current_vllm_config(vllm_config):
        start_groups()
        records = {name: drafted(name, vllm_config) for name in families or MODULES}
    record = {"engine": f"vLLM {__version__}", "families": kept | records}
    file.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
