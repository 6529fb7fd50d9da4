"""A small hybrid with an MTP layer and the packaged tiny model's tokenizer, for servers.

`PYTHONPATH=tests python -m support.hybrid_servers FOLDER` writes it.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig

from specdec_kernels.cli.engine_flags import TINY_TEMPLATE
from specdec_kernels.models.weights.mtp_layouts import QWEN
from specdec_kernels.synthetic.acceptance import PublishedAcceptance
from specdec_kernels.synthetic.models import BRANCH, SyntheticText, synthetic_causal_lm
from specdec_kernels.synthetic.mtp import mtp_text_length, save_with_mtp, synthetic_mtp
from specdec_kernels.tiny import tiny_model

VOCAB = 2048  # of the tokenizer
SCALE = 0.1 / BRANCH  # of the outputs of the target's layers; with more, fewer drafts are accepted


def write_hybrid_with_mtp(folder: Path) -> Path:
    """Write a Qwen3-Next whose next token depends on the last one and on all others before it.

    About half of a greedy text is drafted by the MTP layer. Another first token changes logits of later ones by about 5.
    """
    config = AutoConfig.for_model(
        "qwen3_next", vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=32, max_position_embeddings=2048,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=0, initializer_range=0.3,
        layer_types=["linear_attention", "full_attention"] * 2,
    )  # fmt: skip
    text = SyntheticText.of(VOCAB, VOCAB)
    solved = replace(text, order=text.order[: mtp_text_length(config)])  # for other tokens the layer drafts successors
    target = synthetic_causal_lm(config, text, device=torch.device("cpu"), dtype=torch.float32)
    layer = synthetic_mtp(target, solved, PublishedAcceptance("code", "mtp"), QWEN)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")):
                parameter.mul_(SCALE)
    save_with_mtp(target, layer, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tiny_model("target") / name, folder)
    (folder / "chat_template.jinja").write_text(TINY_TEMPLATE)
    return folder


if __name__ == "__main__":
    print(write_hybrid_with_mtp(Path(sys.argv[1])))
