"""Trains the tiny model family of this directory within a fixed number of minutes.

    python examples/tiny/train.py --minutes 6

Three things come out of it, small enough to be kept beside the tests: a byte-level
BPE tokenizer, a Llama-style target and an EAGLE-3 head with a reduced draft
vocabulary; besides them, held-out prompts and ``metrics.json``. They are a toy, but
a trained one: acceptance depends on what a drafter has learnt, so random weights
would test nothing of it.

Learning rates follow the wall clock (warm-up, plateau, linear decay: "WSD", Hu et
al., arXiv 2404.06395), so the same command fits fast and slow machines.
"""

import argparse
import copy
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import (
    encode_stream,
    is_held_out,
    read_corpus,
    save_tokenizer,
    train_tokenizer,
    write_prompts,
)
from eagle3 import Eagle3Head
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM

VOCAB, DRAFT_VOCAB = 2048, 1024
AUX_LAYERS = [0, 1, 2]  # id i: the state entering decoder layer i + 1
THETA = 10000.0


START = time.monotonic()


def log(*words):
    print(f"[{time.monotonic() - START:6.1f} s]", *words, flush=True)


# ----- the target ------------------------------------------------------------------


def new_target(eos: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=True,
        bos_token_id=eos,
        eos_token_id=eos,
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def rotary(target: LlamaForCausalLM, length: int):
    """Return the RoPE tables, computed once so that compiled steps need not trace them."""
    device = target.device
    positions = torch.arange(length, device=device)[None]
    return target.model.rotary_emb(torch.zeros(1, device=device), positions)


def states(target: LlamaForCausalLM, ids, tables):
    """Return the input state of each layer, and the final normed one.

    The layers are called one by one, without a mask: attention is then the plain
    causal kernel, and the inner states, which EAGLE-3 reads, need no hooks.
    """
    hidden = target.model.embed_tokens(ids)
    entering = []
    for layer in target.model.layers:
        entering.append(hidden)
        hidden = layer(hidden, attention_mask=None, position_embeddings=tables)
    return entering, target.model.norm(hidden)


def aux_states(entering):
    """Return the features that the head reads: three inner states, concatenated."""
    return torch.cat([entering[i + 1] for i in AUX_LAYERS], -1)


@torch.no_grad()
def bits_per_character(target, stream, characters: int, window: int = 2048) -> float:
    """Return bits per character over consecutive windows, each without earlier context."""
    nats = 0.0
    pieces = list(stream[:-1].split(window))
    for begin in range(0, len(pieces), 32):
        group = pieces[begin : begin + 32]
        if len(group[-1]) < len(group[0]):  # a short last piece goes alone
            last = group.pop()
            nats += _nats(target, stream, (len(pieces) - 1) * window, last[None])
        if group:
            nats += _nats(target, stream, begin * window, torch.stack(group))
    return nats / math.log(2) / characters


def _nats(target, stream, offset, ids):
    labels = stream[offset + 1 : offset + 1 + ids.numel()]
    _, hidden = states(target, ids, rotary(target, ids.shape[1]))
    logits = target.lm_head(hidden).float().flatten(0, 1)
    return F.cross_entropy(logits, labels, reduction="sum").item()


class Schedule:
    """Progress by the wall clock; ``factor`` scales the learning rate."""

    def __init__(self, seconds: float, decay_from: float):
        self.begin, self.seconds, self.decay_from = time.monotonic(), seconds, decay_from

    @property
    def progress(self) -> float:
        return (time.monotonic() - self.begin) / self.seconds

    @property
    def factor(self) -> float:
        done = self.progress
        if done < 0.02:
            return max(done / 0.02, 0.01)
        return max(min(1.0, (1 - done) / (1 - self.decay_from)), 0.0)


def optimizer_for(parameters, decay: float, cuda: bool):
    """Return AdamW with weight decay on the matrices only."""
    parameters = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=cuda)


def windows(stream, batch: int, length: int):
    """Draw random windows of the token stream, [batch, length]."""
    starts = torch.randint(len(stream) - length, (batch, 1), device=stream.device)
    return stream[starts + torch.arange(length, device=stream.device)]


def with_repeats(ids, share: float, shortest: int = 32, longest: int = 384):
    """Repeat one passage later in the row, in a share of the rows.

    Files seldom repeat themselves word for word within a window, so a small model hardly learns to
    copy; edited text, which n-gram drafting is for, is mostly copies.
    """
    batch, width = ids.shape
    longest = min(longest, width // 4)
    shortest = min(shortest, longest)
    length = torch.randint(shortest, longest + 1, (batch, 1), device=ids.device)
    first = (torch.rand(batch, 1, device=ids.device) * (width - 2 * length)).long()
    again = first + length + (torch.rand(batch, 1, device=ids.device) * (width - first - 2 * length)).long()
    at = torch.arange(width, device=ids.device).expand(batch, -1)
    copied = (torch.rand(batch, 1, device=ids.device) < share) & (at >= again) & (at < again + length)
    return ids.gather(1, torch.where(copied, at - (again - first), at))


def train_target(target, train, held, characters, seconds, args):
    """Train on the next tokens of random windows; keep the best held-out weights.

    The corpus is about 10 M tokens, fewer than three to a weight, and a fast GPU
    sees all of it in a second or two. So the schedule is short, the weight decay
    strong (Kim et al., arXiv 2509.14786, on training with little data), and
    held-out text decides; a longer schedule ends in learning files by heart.
    """
    device, cuda = target.device, target.device.type == "cuda"
    tables = rotary(target, args.window)
    optimizer = optimizer_for(target.parameters(), args.weight_decay, cuda)

    def loss_of(ids):
        _, hidden = states(target, ids[:, :-1], tables)
        logits = target.lm_head(hidden).float().flatten(0, 1)
        return F.cross_entropy(logits, ids[:, 1:].flatten())

    step_loss = torch.compile(loss_of, dynamic=False) if args.compile else loss_of
    best, best_bits, step, schedule, history = None, float("inf"), 0, None, []

    def check():
        """Measure held-out text, and keep and store these weights if they are better."""
        nonlocal best, best_bits
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            bits = bits_per_character(target, held, characters)
        epochs = step * args.batch * args.window / len(train)
        log(f"target step {step}: {epochs:.1f} epochs, loss {loss.item():.3f}, held-out {bits:.4f} bits/char")
        history.append([step, round(loss.item(), 4), round(bits, 4)])
        if bits < best_bits:
            best, best_bits = copy.deepcopy(target.state_dict()), bits
            save_target(target, args.out)

    stop_at = checked = time.monotonic()
    stop_at += seconds
    while schedule is None or schedule.progress < 1:
        ids = with_repeats(windows(train, args.batch, args.window + 1), args.repeats)
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            loss = step_loss(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (schedule.factor if schedule else 0.01)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if schedule is None:
            loss.item()  # the first step compiles; the schedule starts after it
            checked = time.monotonic()
            schedule = Schedule(stop_at - checked, args.decay_from)
            log("first target step done")
        if step % 8 == 0:
            loss.item()  # keeps the queue of launches short
            if time.monotonic() - checked > args.check_every:
                checked = time.monotonic()
                check()
    check()  # the fully decayed weights, as a rule the best
    target.load_state_dict(best)
    return {
        "steps": step,
        "tokens": step * args.batch * args.window,
        "epochs": round(step * args.batch * args.window / len(train), 1),
        "history": history,
    }


def save_target(target, out: Path):
    """Export in bf16, the precision of everything after this point."""
    rounded = copy.deepcopy(target).to(torch.bfloat16)
    rounded.config.dtype = torch.bfloat16
    rounded.save_pretrained(out / "target")
    path = out / "target" / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = THETA  # for readers older than "rope_parameters"
    path.write_text(json.dumps(config, indent=2) + "\n")


# ----- the head's training text ------------------------------------------------------


@torch.no_grad()
def generate(target, prompts, new_tokens: int, temperature: float):
    """Continue equally long prompts: the text that the head will have to draft."""
    cache, ids, pieces = DynamicCache(), prompts, [prompts]
    for _ in range(new_tokens):
        logits = target(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        if temperature == 0:
            ids = logits.argmax(-1, keepdim=True)
        else:
            ids = torch.multinomial((logits.float() / temperature).softmax(-1), 1)
        pieces.append(ids)
    return torch.cat(pieces, 1)


def self_generated(target, train, args, seconds: float):
    """Generate greedy and sampled continuations of training text, as one token stream.

    EAGLE-3 trains on text that the target wrote, since that is what it drafts.
    Three rounds in four are greedy: greedy decoding is what is measured below. The
    continuations are kept short, because long greedy ones of so small a model loop.
    """
    cuda = target.device.type == "cuda"
    fast = copy.deepcopy(target).to(torch.bfloat16 if cuda else torch.float32)
    prompt, total, rounds = args.window // 16, args.window // 4, []
    deadline = time.monotonic() + seconds
    while not rounds or (time.monotonic() < deadline and len(rounds) < 12):
        ids = windows(train, args.generate_batch, prompt)
        temperature = 1.0 if len(rounds) % 4 == 3 else 0.0
        rounds.append(generate(fast, ids, total - prompt, temperature))
        if cuda:
            torch.cuda.synchronize()
    text = torch.cat(rounds)
    log(f"generated {len(rounds)} rounds, {text.numel() / 1e6:.1f} M tokens")
    return text, prompt


# ----- the head ----------------------------------------------------------------------


def head_config() -> dict:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 896,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
            "use_aux_hidden_state": True,
        },
    }


def save_head(head, out: Path):
    folder = out / "eagle3"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to(torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in head.state_dict().items()
    }
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(head.config, indent=2) + "\n")


def load_head(folder: Path, device) -> Eagle3Head:
    head = Eagle3Head(json.loads((folder / "config.json").read_text()))
    head.load_state_dict(load_file(folder / "model.safetensors"))
    return head.to(device).float().eval()


def train_head(target, train, written, prompt, seconds, args, evaluate):
    """Train by training-time test on half corpus text and half text of the target's own."""
    device, cuda = target.device, target.device.type == "cuda"
    counts = torch.bincount(written[:, prompt:].flatten(), minlength=VOCAB).double()
    counts = counts / counts.sum()
    corpus_counts = torch.bincount(train, minlength=VOCAB).double()
    counts = counts + corpus_counts / corpus_counts.sum()
    kept = counts.topk(DRAFT_VOCAB).indices.sort().values
    coverage = (counts[kept].sum() / counts.sum()).item()
    head = Eagle3Head(head_config()).to(device)
    head.set_draft_vocabulary(kept)
    head.lm_head.weight.data.copy_(target.lm_head.weight.data[kept])
    log(f"draft vocabulary covers {coverage:.3f} of the tokens")

    length = args.window // 2 + 1  # one more than the rows, so that shapes stay round
    tables = rotary(target, length)
    optimizer = optimizer_for(head.parameters(), 0.05, cuda)

    @torch.no_grad()
    def observe(ids):
        entering, hidden = states(target, ids, tables)
        return entering[0][:, 1:], aux_states(entering)[:, :-1], target.lm_head(hidden)[:, 1:]

    def loss_of(embeddings, aux, logits):
        return head.loss(embeddings, aux, logits, args.steps)

    if args.compile:
        observe = torch.compile(observe, dynamic=False)
        loss_of = torch.compile(loss_of, dynamic=False)
    schedule, step, stop_at, checked = None, 0, time.monotonic() + seconds, time.monotonic()
    while schedule is None or schedule.progress < 1:
        half = args.head_batch // 2
        own = written[torch.randint(len(written), (2 * half,), device=device)]
        own = own.view(half, length - 1)  # two texts to a row, and a token to fill it
        own = torch.cat((own, windows(train, half, 1)), 1)
        ids = torch.cat((own, windows(train, args.head_batch - half, length)))
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            loss, agreement = loss_of(*(x.detach() for x in observe(ids)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.head_lr * (schedule.factor if schedule else 0.01)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if schedule is None:
            loss.item()
            schedule = Schedule(stop_at - time.monotonic(), 0.3)
            log("first head step done")
        if step % 8 == 0:
            loss.item()
            if time.monotonic() - checked > args.check_every:
                checked = time.monotonic()
                save_head(head, args.out)
                log(
                    f"head step {step}: loss {loss.item():.3f}, agreement "
                    + " ".join(f"{a:.3f}" for a in agreement.tolist())
                    + f", held-out chain {evaluate(head, 5, 1, 6, 24)['accept_length']:.3f}"
                )
    save_head(head, args.out)
    return {"steps": step, "draft_vocabulary_coverage": round(coverage, 4)}


# ----- evaluation --------------------------------------------------------------------


@torch.no_grad()
def greedy_texts(target, prompts: list[list[int]], new_tokens: int, eos: int) -> list:
    """Return the target's greedy continuations, by recomputing the whole prefix.

    Causal attention does not see padding on the right, so no mask is needed.
    """
    lengths = torch.tensor([len(p) for p in prompts], device=target.device)
    ids = torch.full((len(prompts), max(map(len, prompts)) + new_tokens), eos)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    ids = ids.to(target.device)
    tables, row = rotary(target, ids.shape[1]), torch.arange(len(prompts), device=ids.device)
    for added in range(new_tokens):
        _, hidden = states(target, ids, tables)
        ids[row, lengths + added] = target.lm_head(hidden[row, lengths + added - 1]).argmax(-1)
    texts = []
    for line, length in zip(ids.tolist(), lengths.tolist(), strict=True):
        line = line[: length + new_tokens]
        if eos in line[length:]:
            line = line[: line.index(eos, length)]
        texts.append((line, length))
    return texts


def repeated_share(texts, n: int = 8) -> float:
    """Return the share of generated n-grams that the same continuation already contained."""
    again = total = 0
    for line, length in texts:
        seen = set()
        for i in range(length, len(line) - n + 1):
            gram = tuple(line[i : i + n])
            again += gram in seen
            total += 1
            seen.add(gram)
    return again / max(total, 1)


@torch.no_grad()
def accept_length(head, target, texts, steps, topk, nodes, limit=None) -> dict:
    """Replay speculative decoding along the target's greedy texts.

    Greedy verification always reproduces the greedy text, so that text fixes each
    round's outcome: a round that starts with ``known`` tokens drafts from row
    ``known - 2`` (the last token's own feature is not there yet), gains what was
    accepted plus one token of the target's, and the next round starts there. Rounds
    which the end of the text would cut short are not counted.
    """
    rounds = gained = 0
    depths = [0] * (steps + 1)
    for line, length in texts[:limit]:
        if len(line) < length + steps + 1:
            continue
        tokens = torch.tensor(line, device=target.device)
        bases = torch.arange(length - 1, len(line) - steps - 1, device=target.device)
        entering, _ = states(target, tokens[None], rotary(target, len(line)))
        aux = aux_states(entering)[0]
        accepted = head.accepted(target.model.embed_tokens, tokens, aux, bases, steps, topk, nodes).tolist()
        known = length + 1  # the prompt's own pass has given the first token
        while known - 2 <= len(line) - steps - 2:
            got = accepted[known - 2 - (length - 1)]
            rounds, gained, known = rounds + 1, gained + got + 1, known + got + 1
            depths[got] += 1
    return {
        "accept_length": round(gained / max(rounds, 1), 4),
        "rounds": rounds,
        "accepted_histogram": depths,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, default=Path(json.__file__).parents[1])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--minutes", type=float, default=6.0, help="for everything")
    parser.add_argument("--target-minutes", type=float, default=0.75, help="of these")
    parser.add_argument("--max-files", type=int, help="use a sample of the corpus")
    parser.add_argument("--reuse-target", action="store_true", help="train the head only")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=float, default=0.2, help="share of rows with a passage twice")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=1.0)
    parser.add_argument("--decay-from", type=float, default=0.2, help="share of the schedule")
    parser.add_argument("--head-batch", type=int, default=48)
    parser.add_argument("--head-lr", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=6, help="draft steps unrolled in training")
    parser.add_argument("--generate-batch", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=160, help="to measure acceptance on")
    parser.add_argument("--new-tokens", type=int, default=128, help="of each of these")
    parser.add_argument("--check-every", type=float, default=20, help="seconds")
    args = parser.parse_args()
    deadline = START + 60 * args.minutes
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(20)
    args.out.mkdir(parents=True, exist_ok=True)

    corpus = read_corpus(args.source, args.max_files)
    train_texts = [text for name, text in corpus.items() if not is_held_out(name)]
    held = {name: text for name, text in corpus.items() if is_held_out(name)}
    log(f"{len(train_texts)} files to train on, {len(held)} held out")
    if args.reuse_target:
        tokenizer = AutoTokenizer.from_pretrained(args.out / "target")
    else:
        tokenizer = train_tokenizer(train_texts, VOCAB)
        save_tokenizer(tokenizer, args.out / "target")
    eos = tokenizer.eos_token_id
    train = torch.tensor(encode_stream(tokenizer, train_texts), device=device)
    held_stream = torch.tensor(encode_stream(tokenizer, list(held.values())), device=device)
    characters = sum(map(len, held.values()))
    prompts = write_prompts(args.out / "heldout.jsonl", held)
    log(f"{len(train) / 1e6:.2f} M tokens, {characters / len(held_stream):.2f} characters each; {len(prompts)} prompts")

    reserve = 0.06 * 60 * args.minutes  # for the final evaluation
    if args.reuse_target:
        target = LlamaForCausalLM.from_pretrained(args.out / "target").to(device)
        old = args.out / "metrics.json"
        trained = json.loads(old.read_text())["target"] if old.exists() else {}
    else:
        target = new_target(eos).to(device)
        seconds = 60 * args.target_minutes
        trained = train_target(target, train, held_stream, characters, seconds, args)
        save_target(target, args.out)
    # From here on the target is what a user loads: the stored bf16 weights, in fp32.
    target = target.to(torch.bfloat16).float().eval().requires_grad_(False)
    trained["parameters"] = sum(p.numel() for p in target.parameters())
    trained["held_out_bits_per_character"] = round(bits_per_character(target, held_stream, characters), 4)
    log(f"target: {trained['held_out_bits_per_character']} bits per character")

    texts = {}
    for kind, count in ("code", args.prompts), ("repeat", min(args.prompts, 48)):
        chosen = [p["prompt"] for p in prompts if p["kind"] == kind][:count]
        encoded = tokenizer(chosen, add_special_tokens=False)["input_ids"]
        texts[kind] = greedy_texts(target, encoded, args.new_tokens, eos)
    log("greedy texts written")

    def evaluate(head, steps, topk, nodes, limit=None, kind="code"):
        return accept_length(head, target, texts[kind], steps, topk, nodes, limit)

    remaining = deadline - time.monotonic() - reserve
    written, prompt = self_generated(target, train, args, 0.1 * remaining)
    remaining = deadline - time.monotonic() - reserve
    drafted = train_head(target, train, written, prompt, remaining, args, evaluate)

    head = load_head(args.out / "eagle3", device)
    drafted["parameters"] = sum(p.numel() for p in head.parameters())
    for kind in texts:
        drafted[kind] = {
            "prompts": len(texts[kind]),
            "greedy_repeated_8gram_share": round(repeated_share(texts[kind]), 4),
            "chain_5": evaluate(head, 5, 1, 6, kind=kind),
            "tree_5_8_32": evaluate(head, 5, 8, 32, kind=kind),
        }
        log(kind, json.dumps(drafted[kind]))
    metrics = {
        "minutes": round((time.monotonic() - START) / 60, 2),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "corpus": {
            "files": len(train_texts),
            "held_out_files": len(held),
            "characters": sum(map(len, train_texts)),
            "held_out_characters": characters,
            "tokens": len(train),
            "held_out_tokens": len(held_stream),
        },
        "target": trained,
        "eagle3": drafted,
    }
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    for record in prompts[:3]:
        ids = tokenizer(record["prompt"], add_special_tokens=False)["input_ids"]
        line, length = greedy_texts(target, [ids], 96, eos)[0]
        log("sample:\n" + record["prompt"][-200:] + " >>> " + tokenizer.decode(line[length:]))


if __name__ == "__main__":
    main()
