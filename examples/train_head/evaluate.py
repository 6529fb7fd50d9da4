"""Measure draft heads on held-out prompts: accept lengths by domain, and whether greedy texts are the target's own.

    python examples/train_head/evaluate.py TARGET prompts.jsonl.xz HEADS record.json

HEADS has the folders `eagle3` and `dspark` that `train.py` writes.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from write_text import read_prompts

from specdec_kernels.engine import DSpark, Eagle3, Engine, Ngram, SamplingParams
from specdec_kernels.engine.drafts import Draft


def drafts_of(heads: Path) -> dict[str, Draft | None]:
    """Return the drafts to compare, by name; plain decoding comes first."""
    eagle3, dspark = heads / "eagle3", heads / "dspark"
    found: dict[str, Draft | None] = {"plain": None, "ngram 16": Ngram(num_nodes=16)}
    if dspark.exists():
        found["dspark chain 7"] = DSpark(dspark, topk=1)
        found["dspark tree 16"] = DSpark(dspark, num_nodes=16)
    if eagle3.exists():
        found["eagle3 chain 5"] = Eagle3(eagle3, num_steps=5, topk=1)
        found["eagle3 tree 16"] = Eagle3(eagle3, num_steps=5, topk=4, num_nodes=16)
    if dspark.exists():
        found["dspark tree 8"] = DSpark(dspark, num_nodes=8)
        found["dspark tree 32"] = DSpark(dspark, num_nodes=32)
    return found


def held_out(args: argparse.Namespace, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the prompts to measure on; the last of each domain run alone, so that an n-gram index has no such text."""
    found: list[dict[str, Any]] = []
    for prompt in read_prompts(args.prompts, "held_out", tokenizer):
        before = sum(other["domain"] == prompt["domain"] for other in found)
        if len(prompt["tokens"]) <= args.max_prompt and before < args.prompts_limit:
            found.append(prompt | {"alone": before >= args.prompts_limit - args.alone})
    return found


def measure(
    engine: Engine, prompts: list[dict[str, Any]], new_tokens: int, together: bool
) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the texts of prompts, together in one batch or one after another, and what they took."""
    params, tokens = SamplingParams(max_new_tokens=new_tokens), [prompt["tokens"] for prompt in prompts]
    begin, outputs = time.monotonic(), []
    for some in [tokens] if together else [[each] for each in tokens]:
        outputs += engine.generate(some, params, add_special_tokens=False)
    seconds = time.monotonic() - begin
    totals: dict[str, list[int]] = {}
    for prompt, output in zip(prompts, outputs, strict=True):
        total = totals.setdefault(prompt["domain"], [0, 0])
        total[0] += output.stats.rounds + output.stats.accepted
        total[1] += output.stats.rounds
    lengths = {domain: round(tokens / max(rounds, 1), 3) for domain, (tokens, rounds) in sorted(totals.items())}
    texts = [output.tokens for output in outputs]
    return texts, {"accept_length": lengths, "tokens_per_second": round(sum(map(len, texts)) / seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("heads", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no other draft is begun")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompts-limit", type=int, default=200, help="of each domain")
    parser.add_argument("--alone", type=int, default=8, help="of these, run one by one")
    parser.add_argument("--num-slots", type=int, default=64)
    parser.add_argument("--max-prompt", type=int, default=384)
    parser.add_argument("--adaptive", action="store_true", help="choose how many nodes pay, not all of them")
    args = parser.parse_args()
    cuda, began = torch.cuda.is_available(), time.monotonic()
    record: dict[str, Any] = {"device": torch.cuda.get_device_name() if cuda else "CPU", "drafts": {}}
    record |= {"new_tokens": args.new_tokens, "adaptive": args.adaptive, "batch": args.num_slots}
    prompts: list[dict[str, Any]] = []
    own: dict[str, list[list[int]]] = {}
    for name, draft in drafts_of(args.heads).items():
        if time.monotonic() - began > args.seconds:
            break
        found: dict[str, Any] = {}
        try:
            with Engine(
                args.target,
                draft=draft,
                dtype=torch.bfloat16 if cuda else torch.float32,
                max_len=args.max_prompt + args.new_tokens + 32,
                num_slots=args.num_slots,
                batch_sizes=sorted({1, args.num_slots}),
                adaptive=args.adaptive,
            ) as engine:
                prompts = prompts or held_out(args, engine.tokenizer)
                measure(engine, [{"domain": "", "tokens": list(range(20, 40))}], 8, together=True)  # warm-up
                for key in ("together", "alone"):
                    some = [prompt for prompt in prompts if prompt["alone"] == (key == "alone")]
                    texts, found[key] = measure(engine, some, args.new_tokens, together=key == "together")
                    same = sum(a == b for a, b in zip(texts, own.setdefault(key, texts), strict=True))
                    found[key] |= {"texts": len(texts), "equal_texts": same}
        except Exception as error:  # the other drafts are measured all the same
            found["error"] = f"{type(error).__name__}: {error}"[:400]
        record["drafts"][name] = found
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        words = [f"[{time.monotonic() - began:6.1f} s] {name:15}", found.get("error", "")]
        for key in ("together", "alone"):
            if key in found:
                result = found[key]
                words += [f"{domain} {value:.2f}" for domain, value in result["accept_length"].items()]
                words += [f"{result['tokens_per_second']:.0f}/s, {result['equal_texts']}/{result['texts']} equal |"]
        print(*words, flush=True)


if __name__ == "__main__":
    main()
