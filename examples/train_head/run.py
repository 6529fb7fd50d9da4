"""Train an EAGLE-3 and a DSpark head: prompts, the target's own text, training, evaluation.

    python examples/train_head/run.py smollm2 OUT        # on a GPU
    python examples/train_head/run.py tiny OUT --toy     # on a CPU, to see that all works

The target is a folder in the format of transformers, "smollm2" (the extra's model) or "tiny" (the packaged one).
"""

import argparse
import subprocess
import sys
from pathlib import Path

from transformers import AutoTokenizer

from specdec_kernels.smollm2 import model_path
from specdec_kernels.tiny import tiny_model

HERE = Path(__file__).parent

# Options of the scripts with --toy.
TOY = {
    "prompts": ["--max-files", "100", "--train", "400", "--held-out", "24"],
    "write_text": ["--seconds", "40", "--num-slots", "32", "--new-tokens", "96", "--held-out-tokens", "64"],
    "train": ["--seconds", "300", "--draft-vocab", "1024", "--batch-tokens", "2048"],
    "evaluate": ["--num-slots", "8", "--new-tokens", "64", "--prompts-limit", "24"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target")
    parser.add_argument("out", type=Path)
    parser.add_argument("--toy", action="store_true", help="little text and short training, for a CPU")
    parser.add_argument("--books", type=Path, nargs="*", default=[], help="plain texts for tasks about passages")
    parser.add_argument("--train-seconds", type=float, help="of training (default: 240, with --toy 300)")
    args = parser.parse_args()
    target = tiny_model("target") if args.target == "tiny" else model_path(args.target)
    args.out.mkdir(parents=True, exist_ok=True)
    prompts, text = args.out / "prompts.jsonl.xz", args.out / "text.npz"
    chats = AutoTokenizer.from_pretrained(target).chat_template is not None
    steps = {
        "prompts": [
            prompts,
            "--books",
            *args.books,
            "--domains",
            *(["chat", "code", "prose"] if chats else ["source"]),
        ],
        "write_text": [target, prompts, text],
        "train": [target, text, args.out],
        "evaluate": [target, prompts, args.out, args.out / "evaluation.json"],
    }
    for script, arguments in steps.items():
        more = ["--seconds", args.train_seconds] if script == "train" and args.train_seconds else []
        command = [sys.executable, HERE / f"{script}.py", *arguments, *(TOY[script] if args.toy else []), *more]
        subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    main()
