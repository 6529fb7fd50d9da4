"""Train an EAGLE-3 and a DSpark head on text that their target wrote, within a fixed time.

    python examples/train_head/train.py TARGET text.npz OUT --seconds 240

OUT gets `training.json`, the packed heads `eagle3.safetensors` and `dspark.safetensors` (`pack_head` of
`specdec_kernels.models.weights.packed_heads`), and the folders `eagle3` and `dspark` in the published formats, which an
engine loads. `--published` names another place for these two.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from heads import DSpark, Eagle3, Head, Observed
from torch import Tensor
from transformers import AutoModelForCausalLM

from specdec_kernels.models.weights.packed_heads import pack_head, unpack_head


class Texts:
    """Texts of `write_text.py`: tokens, and the length of each prompt."""

    def __init__(self, file: Path, split: str) -> None:
        with np.load(file) as arrays:
            tokens, self.prompts = arrays[f"{split}_tokens"].astype(np.int64), arrays[f"{split}_prompts"]
            self.texts = np.split(tokens, arrays[f"{split}_ends"][:-1])
            self.domains: list[str] = arrays["held_out_domains"].tolist() if split == "held_out" else []
        self.lengths = np.array([len(text) for text in self.texts])

    def batch(self, indices: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return tokens [B, L], and the positions whose next token counts: the target's predictions of drafts."""
        length = -(-int(self.lengths[indices].max()) // 16) * 16
        tokens = np.zeros((len(indices), length), np.int64)
        counts = np.zeros((len(indices), length), bool)
        for row, index in enumerate(indices):
            tokens[row, : self.lengths[index]] = self.texts[index]
            counts[row, max(1, self.prompts[index]) : self.lengths[index] - 1] = True
        return torch.from_numpy(tokens).to(device, non_blocking=True), torch.from_numpy(counts).to(device)

    def batches(self, num_tokens: int, rng: np.random.Generator | None = None) -> Iterator[np.ndarray]:
        """Yield indices of texts of similar lengths, some `num_tokens` padded tokens at a time; once, or for ever."""
        usable = np.flatnonzero(self.lengths - np.maximum(1, self.prompts) >= 3)
        while True:
            noise = rng.random(len(usable)) * 32 if rng else 0
            order, found, begin = usable[np.argsort(self.lengths[usable] + noise)], [], 0
            for end in range(1, len(order) + 1):
                if end == len(order) or (end + 1 - begin) * (self.lengths[order[end]] + 16) > num_tokens:
                    found.append(order[begin:end])
                    begin = end
            if rng is None:
                yield from found
                return
            yield from (found[index] for index in rng.permutation(len(found)))


class Target:
    """A target that observes texts."""

    def __init__(self, folder: Path, layers: tuple[int, ...], device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model = model.to(device).eval()
        self.layers, self.config = layers, self.model.config
        self.embedding = self.model.get_input_embeddings().weight.detach()
        self.lm_head = self.model.get_output_embeddings().weight.detach()

    @torch.no_grad()
    def observe(self, tokens: Tensor, counts: Tensor, kept: Tensor) -> Observed:
        """Return what the target says of texts; causal attention does not see the padding at their ends."""
        out = self.model.model(tokens, output_hidden_states=True, use_cache=False)
        features = torch.cat([out.hidden_states[layer] for layer in self.layers], -1)
        return Observed(tokens, counts, features, out.last_hidden_state[counts] @ self.lm_head.T, kept)


def feature_layers(depth: int) -> tuple[int, ...]:
    """Return the layers of a target whose input states are the features, as engines choose them for deep targets."""
    return (2, depth // 2, depth - 3) if depth >= 8 else tuple(sorted({1, depth // 2, depth - 1}))


def head_config(target: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Return what the configs of both heads share: layers of the target's shape."""
    heads, rope = target.num_attention_heads, target.rope_parameters
    if rope["rope_type"] != "default":
        raise ValueError(f"rope_type {rope['rope_type']!r} of the target: heads are trained with default RoPE only")
    return {
        "vocab_size": target.vocab_size,
        "draft_vocab_size": args.draft_vocab,
        "hidden_size": target.hidden_size,
        "intermediate_size": args.intermediate or target.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": {"rope_type": "default", "rope_theta": rope["rope_theta"]},
        "tie_word_embeddings": False,
    }


def configs_of(target: Any, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the published configs of the heads. They name the layers that features leave."""
    shared, left = head_config(target, args), [layer - 1 for layer in args.layers]
    return {
        "eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
        | shared
        | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": left, "use_aux_hidden_state": True}},
        "dspark": {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "num_hidden_layers": args.dspark_layers,
        }
        | shared
        | {"num_target_layers": target.num_hidden_layers, "block_size": args.block, "target_layer_ids": left}
        | {"mask_token_id": args.mask_token, "markov_rank": args.rank, "markov_head_type": "vanilla"}
        | {"enable_confidence_head": False},
    }


def optimizers_of(head: Head, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of layers, if it is wanted, and AdamW for the rest."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in head.named_parameters():
        is_matrix = args.muon and parameter.dim() == 2 and "markov" not in name
        (matrices if is_matrix else others).append(parameter)
    found: list[torch.optim.Optimizer] = []
    if matrices:
        found.append(torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    return [*found, torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=args.cuda)]


def factor_of(progress: float) -> float:
    """Return the factor of the learning rate after this share of the time: warm-up, then linear decay to 0."""
    return min(1.0, progress / 0.03 + 0.01) * max(0.0, 1.0 - progress)


def save(heads: dict[str, Head], target: Target, args: argparse.Namespace) -> None:
    """Write heads packed and in the published format."""
    for kind, head in heads.items():
        file, folder = args.out / f"{kind}.safetensors", (args.published or args.out) / kind
        written = file.with_suffix(".new")  # no reader finds half a file
        pack_head(head.config, head.tensors(), head.kept, written)
        written.replace(file)
        folder.mkdir(parents=True, exist_ok=True)
        unpack_head(file, target.lm_head.float().cpu(), folder)


def accept_lengths(text: Observed, accepted: Tensor, texts: Texts, indices: np.ndarray) -> list[tuple[int, int]]:
    """Return, for each text, the tokens and rounds of greedy speculative decoding along it."""
    found = []
    for row, index in enumerate(indices):
        ahead, root, rounds = accepted[row].tolist(), int(texts.prompts[index]), 0
        first = root
        while root < texts.lengths[index] - 1:
            root, rounds = root + min(ahead[root], int(texts.lengths[index]) - 2 - root) + 1, rounds + 1
        found.append((root - first, rounds))
    return found


@torch.no_grad()
def estimate(heads: dict[str, Head], target: Target, texts: Texts, args: argparse.Namespace) -> dict[str, Any]:
    """Return the accept lengths of chains on held-out text, by head and domain."""
    counted: dict[str, dict[str, list[int]]] = {kind: {} for kind in heads}
    for indices in texts.batches(args.batch_tokens // 4):
        text = target.observe(*texts.batch(indices, target.embedding.device), next(iter(heads.values())).kept)
        for kind, head in heads.items():
            with torch.autocast(target.embedding.device.type, torch.bfloat16, enabled=args.cuda):
                accepted = head.accepted(text)
            for index, (tokens, rounds) in zip(indices, accept_lengths(text, accepted, texts, indices), strict=True):
                total = counted[kind].setdefault(texts.domains[index], [0, 0])
                total[0] += tokens
                total[1] += rounds
    return {
        kind: {domain: round(tokens / max(rounds, 1), 3) for domain, (tokens, rounds) in sorted(domains.items())}
        for kind, domains in counted.items()
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--published", type=Path, help="for the folders in the published formats")
    parser.add_argument("--seconds", type=float, default=240, help="of training")
    parser.add_argument("--max-steps", type=int, default=1 << 30)
    parser.add_argument("--kinds", nargs="+", default=["eagle3", "dspark"])
    parser.add_argument("--layers", type=int, nargs="+", help="of the target, whose input states are the features")
    parser.add_argument("--draft-vocab", type=int, default=12288, help="at most the target's")
    parser.add_argument(
        "--intermediate", type=int, help="size of the heads' feed-forward parts (default: the target's)"
    )
    parser.add_argument("--dspark-layers", type=int, default=2)
    parser.add_argument("--block", type=int, default=7)
    parser.add_argument("--rank", type=int, default=32, help="of DSpark's Markov head")
    parser.add_argument("--mask-token", type=int, help="of DSpark's blocks (default: the first that no text has)")
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=5, help="of EAGLE-3's training-time test")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--muon", action=argparse.BooleanOptionalAction, default=True, help="for matrices of layers")
    parser.add_argument("--ce", type=float, default=0.1, help="share of the cross-entropy in DSpark's loss")
    parser.add_argument("--save-every", type=float, default=60, help="seconds")
    args = parser.parse_args()
    args.cuda = torch.cuda.is_available()
    return args


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it compiles for each shape
    device, began = torch.device("cuda" if args.cuda else "cpu"), time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    train, held = Texts(args.text, "train"), Texts(args.text, "held_out")
    depth = json.loads((args.target / "config.json").read_text())["num_hidden_layers"]
    args.layers = tuple(args.layers or feature_layers(depth))
    target = Target(args.target, args.layers, device)
    args.draft_vocab = min(args.draft_vocab, target.config.vocab_size)
    if args.mask_token is None:
        everything = torch.from_numpy(np.concatenate(train.texts))
        args.mask_token = int(torch.bincount(everything, minlength=target.config.vocab_size).argmin())
    configs = configs_of(target.config, args)
    new = [text[prompt:] for text, prompt in zip(train.texts, train.prompts, strict=True)]
    seen = torch.bincount(torch.from_numpy(np.concatenate(new)), minlength=target.config.vocab_size)
    kept = seen.topk(args.draft_vocab).indices.sort().values.to(device)
    coverage = float(seen[kept.cpu()].sum() / seen.sum())
    kinds = {"eagle3": Eagle3, "dspark": DSpark}
    shared = kept, target.embedding, target.lm_head, len(args.layers)
    heads: dict[str, Head] = {kind: kinds[kind](configs[kind], *shared).to(device) for kind in args.kinds}
    optimizers = {kind: optimizers_of(head, args) for kind, head in heads.items()}
    sizes = {kind: sum(parameter.numel() for parameter in head.parameters()) for kind, head in heads.items()}
    print(f"{len(train.texts)} texts, {int(train.lengths.sum()) / 1e6:.2f} M tokens; coverage {coverage:.4f}; {sizes}")
    rng, generator = np.random.default_rng(0), torch.Generator(device).manual_seed(0)
    start = saved = time.monotonic()
    step, tokens = 0, 0
    history: list[list[float]] = []
    losses: dict[str, Tensor] = {}
    record: dict[str, Any] = {"parameters": sizes, "coverage": coverage, "layers": args.layers, "history": history}
    for indices in train.batches(args.batch_tokens, rng):
        progress = max((time.monotonic() - start) / args.seconds, step / args.max_steps)
        if progress >= 1:
            break
        text = target.observe(*train.batch(indices, device), kept)
        for kind, head in heads.items():
            with torch.autocast(device.type, torch.bfloat16, enabled=args.cuda):
                loss = head.loss(text, generator, steps=args.steps, ce=args.ce)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            for optimizer in optimizers[kind]:
                for group in optimizer.param_groups:
                    group["lr"] = args.lr * factor_of(progress)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            losses[kind] = loss.detach()
        step, tokens = step + 1, tokens + text.tokens.numel()
        if step % 50 == 0:
            history.append([step, tokens, *(round(float(loss), 4) for loss in losses.values())])
            print(
                f"[{time.monotonic() - began:6.1f} s] step {step}, {tokens / 1e6:.2f} M tokens, loss {history[-1][2:]}",
                flush=True,
            )
            if time.monotonic() - saved > args.save_every:
                save(heads, target, args)
                saved = time.monotonic()
    save(heads, target, args)
    record |= {"steps": step, "tokens": tokens, "seconds": round(time.monotonic() - start, 1)}
    record["device"] = torch.cuda.get_device_name() if args.cuda else "CPU"
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    record["accept_length"] = estimate(heads, target, held, args)
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    passed, lengths = time.monotonic() - began, record["accept_length"]
    print(f"[{passed:6.1f} s] {step} steps, {tokens / 1e6:.1f} M tokens; accept lengths on held-out text {lengths}")


if __name__ == "__main__":
    main()
