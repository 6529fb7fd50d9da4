"""Measure draft heads on held-out prompts: accept lengths by domain, and whether greedy texts are the target's own.

    python examples/train_head/evaluate.py TARGET prompts.jsonl.xz HEADS record.json

HEADS has the folders `eagle3` and `dspark` that `train.py` writes. `--only` chooses drafts; a record that exists keeps
its other drafts. The first draft's texts are written next to the record, and the others' are compared with them. Names
that begin with "transformers" are its own ways to generate, for the prompts that run alone.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from write_text import read_prompts

from specdec_kernels.engine import DSpark, Eagle3, Engine, Ngram, SamplingParams
from specdec_kernels.engine.drafts import Draft

TRANSFORMERS: dict[str, dict[str, Any]] = {
    "transformers plain": {},
    "transformers prompt lookup 10": {"prompt_lookup_num_tokens": 10},
    "transformers early exit": {"assistant_early_exit": 0.5},  # share of the target's layers
}


UNCALIBRATED = "uncalibrated"


class Result:
    """Greedy texts of prompts, the target's passes over each, and the time of them all."""

    def __init__(self, prompts: list[dict[str, Any]]) -> None:
        self.prompts = prompts
        self.texts: list[list[int]] = []
        self.tokens: list[int] = []  # of each text, that the passes below wrote
        self.passes: list[int] = []
        self.began, self.seconds = time.monotonic(), 0.0

    def add(self, text: list[int], tokens: int, passes: int) -> None:
        self.texts.append(text)
        self.tokens.append(tokens)
        self.passes.append(passes)
        self.seconds = time.monotonic() - self.began

    def record(self, own: list[list[int]]) -> dict[str, Any]:
        """Return accept lengths by domain, the speed, and how many texts equal the target's own."""
        totals: dict[str, list[int]] = {}
        for prompt, tokens, passes in zip(self.prompts, self.tokens, self.passes, strict=True):
            total = totals.setdefault(prompt["domain"], [0, 0])
            total[0] += tokens
            total[1] += passes
        return {
            "accept_length": {
                domain: round(tokens / max(passes, 1), 3) for domain, (tokens, passes) in sorted(totals.items())
            },
            "tokens_per_second": round(sum(map(len, self.texts)) / self.seconds, 1),
            "texts": len(self.texts),
            "equal_texts": sum(a == b for a, b in zip(self.texts, own, strict=True)),
        }


def drafts_of(heads: Path) -> dict[str, Callable[[], Draft | None]]:
    """Return what makes the drafts to compare, by name; plain decoding comes first.

    The size of a tree is that of its drafted nodes, without the root. Drafts whose names end with UNCALIBRATED score
    candidates by their own probabilities.
    """
    eagle3, dspark = heads / "eagle3", heads / "dspark"
    found: dict[str, Callable[[], Draft | None]] = {"plain": lambda: None, "ngram 16": lambda: Ngram(num_nodes=17)}

    def spark(size: int) -> Draft:
        return DSpark(dspark, num_nodes=size + 1)

    def eagle(size: int) -> Draft:
        return Eagle3(eagle3, num_steps=5, topk=4, num_nodes=size + 1)

    if dspark.exists():
        found["dspark chain 7"] = lambda: DSpark(dspark, topk=1)
        found["dspark tree 16"] = lambda: spark(16)
    if eagle3.exists():
        found["eagle3 chain 5"] = lambda: Eagle3(eagle3, num_steps=5, topk=1)
        found["eagle3 tree 16"] = lambda: eagle(16)
    if dspark.exists():
        found |= {f"dspark tree {size}": lambda size=size: spark(size) for size in (8, 32)}
    if eagle3.exists():
        found |= {f"eagle3 tree {size}": lambda size=size: eagle(size) for size in (8, 32)}
    if dspark.exists():
        found |= {f"dspark tree {size} {UNCALIBRATED}": lambda size=size: spark(size) for size in (16, 8, 32)}
    if eagle3.exists():
        found |= {f"eagle3 tree {size} {UNCALIBRATED}": lambda size=size: eagle(size) for size in (16, 8, 32)}
    return found


def held_out(args: argparse.Namespace, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the prompts to measure on; the last of each domain run alone, so that an n-gram index has no such text."""
    found: list[dict[str, Any]] = []
    for prompt in read_prompts(args.prompts, "held_out", tokenizer):
        before = sum(other["domain"] == prompt["domain"] for other in found)
        if len(prompt["tokens"]) <= args.max_prompt and before < args.prompts_limit:
            found.append(prompt | {"alone": before >= args.prompts_limit - args.alone})
    return found


def measure(engine: Engine, prompts: list[dict[str, Any]], new_tokens: int, together: bool) -> Result:
    """Let the engine continue prompts, together in one batch or one after another."""
    params, tokens = SamplingParams(max_new_tokens=new_tokens), [prompt["tokens"] for prompt in prompts]
    result = Result(prompts)
    for some in [tokens] if together else [[each] for each in tokens]:
        for output in engine.generate(some, params, add_special_tokens=False):
            result.add(output.tokens, output.stats.rounds + output.stats.accepted, output.stats.rounds)
    return result


def run_engine(
    draft: Draft | None, prompts: list[dict[str, Any]], args: argparse.Namespace, *, calibrate: bool
) -> dict[str, Result]:
    """Return the results of the prompts that run together, and of those that run alone."""
    with Engine(
        args.target,
        draft=draft,
        dtype=args.dtype,
        device=args.device,
        max_len=args.max_prompt + args.new_tokens + 32,
        num_slots=args.num_slots,
        batch_sizes=sorted({1, args.num_slots}),
        adaptive=args.adaptive,
        calibrate=calibrate,
    ) as engine:
        measure(engine, [{"domain": "", "tokens": list(range(20, 40))}], 8, together=True)  # warm-up
        return {
            key: measure(engine, some, args.new_tokens, together=key == "together")
            for key in ("together", "alone")
            if (some := [prompt for prompt in prompts if prompt["alone"] == (key == "alone")])
        }


def run_transformers(
    options: dict[str, Any], prompts: list[dict[str, Any]], args: argparse.Namespace
) -> dict[str, Result]:
    """Return the result of transformers' greedy generation for the prompts that run alone.

    A pass of the target is one of its last layer: those that exit early do not reach it. The pass over the prompt
    verifies drafts too, where there are some.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype)
    model, passes = model.to(args.device).eval(), 0
    layers = model.model.layers
    if "assistant_early_exit" in options:
        options = {"assistant_early_exit": max(1, int(len(layers) * options["assistant_early_exit"]))}

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    def generate(tokens: list[int], new_tokens: int) -> list[int]:
        ids = torch.tensor([tokens], device=args.device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, **options
        )
        return out[0, len(tokens) :].tolist()

    generate(list(range(20, 40)), 8)  # warm-up
    layers[-1].register_forward_hook(count)
    result = Result(some := [prompt for prompt in prompts if prompt["alone"]])
    for prompt in some:
        passes = 0
        text = generate(prompt["tokens"], args.new_tokens)
        result.add(text, len(text), passes)
    return {"alone": result} if some else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("heads", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of drafts, as in a record")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no other draft is begun")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompts-limit", type=int, default=200, help="of each domain")
    parser.add_argument("--alone", type=int, default=8, help="of these, run one by one")
    parser.add_argument("--num-slots", type=int, default=64)
    parser.add_argument("--max-prompt", type=int, default=384)
    parser.add_argument("--adaptive", action="store_true", help="choose how many nodes pay, not all of them")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    on_gpu, began = torch.device(args.device).type == "cuda", time.monotonic()
    args.dtype = torch.bfloat16 if on_gpu else torch.float32
    drafts = drafts_of(args.heads)
    names = args.only or [*drafts, *TRANSFORMERS]
    if unknown := set(names) - {*drafts, *TRANSFORMERS}:
        parser.error(f"--only: {', '.join(sorted(unknown))} unknown, expected of {', '.join([*drafts, *TRANSFORMERS])}")
    settings = {"device": torch.cuda.get_device_name() if on_gpu else "CPU", "new_tokens": args.new_tokens}
    settings |= {"adaptive": args.adaptive, "batch": args.num_slots, "alone": args.alone}
    settings |= {"prompts_per_domain": args.prompts_limit}
    record: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else settings | {"drafts": {}}
    if other := {name for name, value in settings.items() if record.get(name) != value}:
        parser.error(f"{args.out} was measured with other settings: {', '.join(sorted(other))}")
    prompts = held_out(args, AutoTokenizer.from_pretrained(args.target))
    own_file = args.out.with_name(f"{args.out.stem}_texts.json")  # what texts are compared with
    own: dict[str, list[list[int]]] = json.loads(own_file.read_text()) if own_file.exists() else {}
    for name in names:
        if time.monotonic() - began > args.seconds:
            break
        found: dict[str, Any] = {}
        try:
            if name in TRANSFORMERS:
                results = run_transformers(TRANSFORMERS[name], prompts, args)
            else:
                results = run_engine(drafts[name](), prompts, args, calibrate=not name.endswith(UNCALIBRATED))
            for key, result in results.items():
                found[key] = result.record(own.setdefault(key, result.texts))
        except Exception as error:  # the other drafts are measured all the same
            found["error"] = f"{type(error).__name__}: {error}"[:400]
        record["drafts"][name] = found
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        own_file.write_text(json.dumps(own) + "\n")
        words = [f"[{time.monotonic() - began:6.1f} s] {name:28}", found.get("error", "")]
        for key in ("together", "alone"):
            if key in found:
                result = found[key]
                words += [f"{domain} {value:.2f}" for domain, value in result["accept_length"].items()]
                words += [f"{result['tokens_per_second']:.0f}/s, {result['equal_texts']}/{result['texts']} equal |"]
        print(*words, flush=True)
        if on_gpu:
            torch.cuda.synchronize()  # raises after an error of a kernel, which fails whatever comes next


if __name__ == "__main__":
    main()
