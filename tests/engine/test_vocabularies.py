"""Drafts of another vocabulary: which tokens are shared, what is fed for the others, and whose text it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from specdec_kernels.engine import DraftBudget, Engine, SamplingParams, Standalone
from specdec_kernels.engine.drafts.proposal import scored_tree_of
from specdec_kernels.engine.drafts.vocabularies import LETTERS, shared_tokens
from support.random_checkpoints import save_random_model
from support.tiny_checkpoint import greedy_by_transformers

WORDS = [" the", " of", "tion", " draft", "é", " speaks"]
STEPS = 3


def of_bytes(words: list[str], eos: str = "<|end|>") -> PreTrainedTokenizerFast:
    """As GPT-2's and Llama 3's are: a token of each byte, in letters that stand for them, and of these words."""
    letter = {byte: letter for letter, byte in LETTERS.items()}
    tokens = [eos, *letter.values(), *("".join(letter[byte] for byte in word.encode()) for word in words)]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(dict.fromkeys(tokens))}, [], ignore_merges=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)


def of_sentencepiece(words: list[str]) -> PreTrainedTokenizerFast:
    """As Llama 2's are: spaces as a letter of their own, bytes as <0x00>, and the words in another order."""
    tokens = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *(w.replace(" ", "▁") for w in reversed(words)),
    ]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def test_vocabulary_map_matches_tokens_by_text() -> None:
    target, draft = of_bytes(WORDS), of_sentencepiece([" other", *WORDS[2:-1]])
    shared = shared_tokens(target, len(target), draft, len(draft))
    assert shared is not None
    text = {int(i): target.decode([int(j)]) for i, j in zip(shared.draft_ids, shared.target_ids, strict=True)}
    of_target, of_draft = target.get_vocab(), draft.get_vocab()
    pairs = dict(zip(shared.draft_ids.tolist(), shared.target_ids.tolist(), strict=True))
    assert len(set(pairs.values())) == len(pairs) == 256 + 3 + 1  # bytes, words, what ends a text
    assert pairs[of_draft["▁draft"]] == of_target["Ġdraft"] and text[of_draft["▁draft"]] == " draft"
    assert pairs[of_draft["<0x41>"]] == of_target["A"] and pairs[of_draft["<0xC3>"]] == of_target["Ã"]
    assert pairs[of_draft["é"]] == of_target["Ã©"]
    assert pairs[of_draft["</s>"]] == of_target["<|end|>"]
    assert not {of_draft["▁other"], of_draft["<unk>"]} & pairs.keys()
    for theirs, ours in pairs.items():
        assert shared.fed_ids[ours] == theirs
    # What the draft lacks is fed as the end of the text.
    assert (
        shared.fed_ids[of_target["Ġspeaks"]] == of_draft["<0x73>"]
        and draft(" speaks")["input_ids"][-1] == of_draft["<0x73>"]
    )
    assert shared.fed_ids[of_target["Ġthe"]] == of_draft["<0x65>"]


def test_shared_tokens_of_vocabularies_that_differ_in_size() -> None:
    """As in Qwen2.5: more rows than tokens in both models, and not equally many."""
    tokenizer = of_bytes(WORDS)
    count = len(tokenizer)
    assert shared_tokens(tokenizer, count + 5, of_bytes(WORDS), count + 5) is None
    for sizes in ((count + 9, count + 2), (count + 2, count + 9), (count, count + 1)):
        shared = shared_tokens(tokenizer, sizes[0], of_bytes(WORDS), sizes[1])
        assert shared is not None
        assert shared.draft_ids.tolist() == shared.target_ids.tolist() == list(range(count))
        assert shared.fed_ids[:count].tolist() == list(range(count)) and int(shared.fed_ids.max()) < sizes[1]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = of_bytes(WORDS)
    folder = save_random_model(
        tmp_path_factory.mktemp("target"), "llama", vocab_size=len(tokenizer) + 3, initializer_range=0.08
    )
    tokenizer.save_pretrained(folder)
    return folder


def translated(target: Path, folder: Path, tokenizer: Any, rows: int) -> Path:
    """Write the target's weights under the ids of another tokenizer; with all tokens shared, its drafts are right."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    own = of_bytes(WORDS)
    shared = shared_tokens(own, model.config.vocab_size, tokenizer, rows)
    assert shared is not None
    ours, theirs = shared.target_ids.long(), shared.draft_ids

    def moved(weight: Tensor) -> torch.nn.Parameter:
        other = torch.randn(rows, weight.shape[1]) * 0.08
        other[theirs] = weight.detach()[ours]
        return torch.nn.Parameter(other)

    embedding, head = moved(model.get_input_embeddings().weight), moved(model.lm_head.weight)
    model.resize_token_embeddings(rows)
    model.get_input_embeddings().weight, model.lm_head.weight = embedding, head
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def engine_of(target: Path, draft: Standalone) -> Engine:
    return Engine(target, draft=draft, adaptive=False, max_len=128, num_slots=2, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("draft", ["all shared", "another size", "some shared"])
@pytest.mark.parametrize("topk", [1, 3])
def test_mapped_draft_text_equals_target(
    topk: int, draft: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = {
        "all shared": of_sentencepiece([" more", *WORDS]),
        "another size": of_bytes(WORDS),
        "some shared": of_sentencepiece([" more", *WORDS[2:]]),
    }
    tokenizer = tokenizers[draft]
    folder = translated(target, tmp_path / "draft", tokenizer, len(tokenizer) + 7)
    engine = engine_of(target, Standalone(folder, num_steps=STEPS, topk=topk))
    proposed: set[int] = set()
    propose = engine.draft.propose

    def keep(slots: Tensor, budget: DraftBudget) -> Any:
        proposal = propose(slots, budget)
        tree = scored_tree_of(proposal.drafts, slots, budget.num_nodes, engine.state).tree
        proposed.update(tree.tokens[:, 1:][tree.parents[:, 1:] >= 0].tolist())
        return proposal

    monkeypatch.setattr(engine.draft, "propose", keep)
    prompts = [engine.tokenizer("the draft of")["input_ids"], engine.tokenizer(" speaks")["input_ids"]]
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=25, ignore_eos=True))
    reference = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    for prompt, output in zip(prompts, outputs, strict=True):
        (want,) = greedy_by_transformers(reference, [prompt], 25, eos_token_id=None)
        assert output.tokens == want
    assert isinstance(engine.draft, Standalone) and engine.draft.shared is not None
    assert proposed <= set(engine.draft.shared.target_ids.tolist())
    if topk == 1 and draft != "some shared":
        assert all(token < len(engine.tokenizer) for output in outputs for token in output.tokens)
        # The same model but for the rows that have no token, which it never reads here: every draft is right.
        assert [output.stats.accept_length for output in outputs] == [STEPS + 1] * 2


def test_mapped_draft_sampling(target: Path, tmp_path: Path) -> None:
    """Drawn over what is shared, and accepted or rejected as drawn from that."""
    tokenizer = of_sentencepiece([" more", *WORDS])
    folder = translated(target, tmp_path / "draft", tokenizer, len(tokenizer))
    engine = engine_of(target, Standalone(folder, num_steps=STEPS, topk=1, sampled=True))
    (output,) = engine.generate(
        "the draft", SamplingParams(max_new_tokens=32, temperature=0.7, seed=3, ignore_eos=True)
    )
    assert len(output.tokens) == 32 and output.stats.accept_length > 2


def test_unmappable_vocabulary_is_refused(target: Path, tmp_path: Path) -> None:
    bare = save_random_model(tmp_path / "bare", "llama")
    vocab = len(of_bytes(WORDS)) + 3
    with pytest.raises(ValueError) as error:
        engine_of(target, Standalone(bare))
    assert str(error.value) == (
        f"Standalone: model has vocab_size 199, expected the target's {vocab}, or a tokenizer of both "
        "(draft: the model folder has no tokenizer)"
    )
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "nothing": 1, "alike": 2}, unk_token="<unk>"))
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    with pytest.raises(ValueError) as error:
        engine_of(target, Standalone(bare, tokenizer=own, topk=4))
    assert str(error.value) == "Standalone: model shares 0 tokens with the target, expected at least topk=4"
