"""Let a target write text after prompts, for the training of its draft heads.

    python examples/train_head/write_text.py TARGET prompts.jsonl.xz text.npz --seconds 100

The first pass over the prompts is greedy; each pass after it samples.
"""

import argparse
import itertools
import json
import lzma
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec_kernels.engine import Engine, SamplingParams


def read_prompts(file: Path, split: str, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the prompts of a split with their tokens, as chats where the target has a template of them."""
    with lzma.open(file, "rt") as opened:
        prompts = [prompt for line in opened if (prompt := json.loads(line))["split"] == split]
    texts = [prompt["prompt"] for prompt in prompts]
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": text}] for text in texts]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    for prompt, tokens in zip(prompts, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True):
        prompt["tokens"] = tokens
    return prompts


class Written:
    """Texts that a target wrote, and the length of each one's prompt."""

    def __init__(self) -> None:
        self.texts: list[np.ndarray] = []
        self.prompts: list[int] = []

    def write(self, engine: Engine, prompts: list[list[int]], new_tokens: int, temperature: float, seed: int) -> None:
        """Let the engine continue prompts, each with a seed of its own."""
        params = [
            SamplingParams(max_new_tokens=new_tokens, temperature=temperature, seed=seed + i if temperature else None)
            for i in range(len(prompts))
        ]
        for output in engine.generate(prompts, params, add_special_tokens=False):
            self.texts.append(np.array(output.prompt_tokens + output.tokens, dtype=np.int32))
            self.prompts.append(len(output.prompt_tokens))

    @property
    def num_new(self) -> int:
        return sum(map(len, self.texts)) - sum(self.prompts)

    def arrays(self, prefix: str) -> dict[str, np.ndarray]:
        """Return what is stored: the tokens of all texts, where each text ends in them, and the lengths of prompts."""
        ends = np.cumsum([len(text) for text in self.texts])
        arrays = {"tokens": np.concatenate(self.texts), "ends": ends, "prompts": np.array(self.prompts)}
        return {f"{prefix}_{name}": array for name, array in arrays.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=100, help="after which no more texts are begun")
    parser.add_argument("--new-tokens", type=int, default=320)
    parser.add_argument("--held-out-tokens", type=int, default=128, help="new tokens after each held-out prompt")
    parser.add_argument("--max-prompt", type=int, default=384, help="tokens; longer prompts are left out")
    parser.add_argument("--prompts-limit", type=int, help="use the first prompts only")
    parser.add_argument("--num-slots", type=int, default=768)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    begin = time.monotonic()
    with Engine(
        args.target,
        dtype=torch.bfloat16 if cuda else torch.float32,
        max_len=args.max_prompt + args.new_tokens,
        num_slots=args.num_slots,
        batch_sizes=sorted({-(-args.num_slots // part) for part in (16, 4, 2, 1)}),
    ) as engine:
        usable = {
            split: [prompt for prompt in prompts if len(prompt["tokens"]) <= args.max_prompt][: args.prompts_limit]
            for split in ("train", "held_out")
            for prompts in [read_prompts(args.prompts, split, engine.tokenizer)]
        }
        prompts = [prompt["tokens"] for prompt in usable["train"]]
        started = time.monotonic()
        print(f"{len(prompts)} prompts, engine started in {started - begin:.1f} s", flush=True)
        held, train = Written(), Written()
        held.write(engine, [prompt["tokens"] for prompt in usable["held_out"]], args.held_out_tokens, 0.0, 0)
        # The first pass is greedy. A prompt has one greedy text, so all others sample.
        passes = [(0.0, 0), *((temperature, seed) for seed in range(1, 100) for temperature in (0.8, 1.0))]
        chunk = args.num_slots  # a prompt that starts alone would make the others wait
        for number, ((temperature, seed), first) in enumerate(itertools.product(passes, range(0, len(prompts), chunk))):
            if number and time.monotonic() - started > args.seconds:
                break
            train.write(engine, prompts[first : first + chunk], args.new_tokens, temperature, (seed << 24) + first)
    domains = np.array([prompt["domain"] for prompt in usable["held_out"]])
    arrays: dict[str, Any] = train.arrays("train") | held.arrays("held_out") | {"held_out_domains": domains}
    np.savez(args.out, **arrays)
    seconds = time.monotonic() - started
    print(
        f"{len(train.texts)} texts, {train.num_new / 1e6:.2f} M new tokens and {held.num_new / 1e3:.0f} k held out "
        f"in {seconds:.1f} s: {(train.num_new + held.num_new) / seconds:.0f} tokens/s",
        flush=True,
    )


if __name__ == "__main__":
    main()
