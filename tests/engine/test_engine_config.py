"""What an engine is made with, resolved without a model: defaults, checks, and sizes that no machine has."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from specdec_kernels import _C
from specdec_kernels.engine import Draft, Engine, EngineOptions, Needs, Ngram, SamplingParams
from specdec_kernels.engine.config import EngineConfig, Machine, budget_levels, host_bytes, ring_bytes
from specdec_kernels.engine.device.rings import Rings
from specdec_kernels.engine.options import RING_DEPTH
from specdec_kernels.ops import make_slot_state
from support.devices import HAS_CUDA
from support.random_checkpoints import save_random_model

CPU = Machine(torch.device("cpu"), 64 * 10**9)
CUDA = Machine(torch.device("cuda"), 140 * 10**9)  # asked for nothing but its kind
MODEL = LlamaConfig(
    vocab_size=1000, hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
    max_position_embeddings=4096, dtype=torch.bfloat16,
)  # fmt: skip


class Tree(Draft):
    """A draft with a model's needs, and none."""

    def __init__(self, sampled: bool = False, reads_others: bool = False, **needs: Any) -> None:
        self.sampled, self.reads_others = sampled, reads_others
        self._needs = Needs(**({"num_nodes": 32, "accept_width": 6, "scratch_rows": 33, "kv_numbers": 256} | needs))

    def needs(self, target: Any) -> Needs:
        assert target is MODEL
        return self._needs


def resolve(draft: Draft | None = None, machine: Machine = CPU, **options: Any) -> EngineConfig:
    return EngineConfig.resolve(MODEL, draft or Draft(), machine, EngineOptions(**options))


def refusal(draft: Draft | None = None, machine: Machine = CPU, **options: Any) -> str:
    with pytest.raises(ValueError) as error:
        resolve(draft, machine, **options)
    return str(error.value)


# --- defaults


def test_defaults_on_a_cpu() -> None:
    got = resolve()
    assert (got.max_len, got.num_slots, got.page_size, got.prefill_chunk) == (2048, 8, 16, 2048)
    assert (got.dtype, got.kv_dtype) == (torch.float32, torch.float32)
    assert got.reserve == 2 and got.max_pages == 129 and got.num_pages == 8 * 129
    assert got.batch_sizes == tuple(range(1, 9)) and got.measured_sizes == (1, 8)
    assert got.rows == tuple((batch,) for batch in range(1, 9)) and got.rounds_in_flight == 1
    assert not got.captures and got.fixed_split is None and got.prefill_requests == 8 and got.top_n == 20


def test_defaults_on_a_gpu() -> None:
    got = resolve(Tree(), CUDA, num_slots=20)
    assert (got.dtype, got.kv_dtype) == (torch.bfloat16, torch.bfloat16)
    assert got.captures and got.batch_sizes == got.measured_sizes == (1, 2, 4, 8, 12, 16, 20)
    assert got.rows == tuple(budget_levels(batch, 32) for batch in got.batch_sizes) and got.rounds_in_flight == 2
    called = resolve(Tree(), CUDA, cuda_graph=False)
    assert not called.captures and called.batch_sizes == tuple(range(1, 9))
    assert called.rows == tuple((32 * batch,) for batch in called.batch_sizes)


def test_max_len_defaults_to_model_limit() -> None:
    short = LlamaConfig(**{**MODEL.to_dict(), "max_position_embeddings": 300})
    assert EngineConfig.resolve(short, Draft(), CPU, EngineOptions()).max_len == 300


@pytest.mark.parametrize(
    ("needs", "reserve"),
    [
        ({}, 34),  # the draft's scratch
        ({"num_nodes": 40}, 41),  # the tree
        ({"num_nodes": 4, "scratch_rows": 0}, 7),  # the accepted rows
    ],
)
def test_rows_are_reserved_for_whatever_writes_most(needs: dict[str, int], reserve: int) -> None:
    got = resolve(Tree(**needs), page_size=1)
    assert got.reserve == reserve and got.max_pages == 2048 + reserve


@pytest.mark.parametrize("machine", [CPU, CUDA], ids=["cpu", "cuda"])
def test_rounds_are_adaptive_where_that_is_exact(machine: Machine) -> None:
    assert resolve(Tree(), machine).num_levels == len(budget_levels(8, 32))
    for draft, options in (
        (Tree(sampled=True), {}),
        (Tree(), {"batch_invariant": True}),
        (Tree(), {"adaptive": False}),
    ):
        got = resolve(draft, machine, **options)
        assert got.rows == tuple((32 * batch,) for batch in got.batch_sizes)
    drawn = resolve(Tree(sampled=True), machine, adaptive=True)
    assert drawn.rows[-1] == budget_levels(8, 32, equal=True)


def test_batch_invariant_config_has_one_size() -> None:
    got = resolve(batch_invariant=True)
    assert got.batch_sizes == (8,) and got.fixed_split == 1024 and got.prefill_requests == 1


def test_a_share_of_the_memory_is_tried_out_with_one_request() -> None:
    got = resolve(machine=CUDA, mem_fraction=0.5, num_slots=100)
    assert got.mem_fraction == 0.5 and got.num_pages == got.max_pages


def test_config_is_a_value() -> None:
    draft = Tree()
    assert resolve(draft) == resolve(draft) and hash(resolve(draft)) == hash(resolve(draft))
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve().max_len = 5  # type: ignore[misc]


# --- checks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_len": 1}, "Engine: max_len is 1, expected at least 2"),
        ({"num_slots": 0}, "Engine: num_slots is 0, expected at least 1"),
        ({"page_size": 1.5}, "Engine: page_size is 1.5, expected an integer"),
        ({"page_size": "4"}, "Engine: page_size is '4', expected an integer"),
        ({"num_slots": True}, "Engine: num_slots is True, expected an integer"),
        ({"num_pages": 1e9}, "Engine: num_pages is 1000000000.0, expected an integer or None"),
        ({"prefix_cache": "on"}, "Engine: prefix_cache is 'on', expected True, False or None"),
        ({"cuda_graph": 1}, "Engine: cuda_graph is 1, expected True or False"),
        ({"mem_fraction": "0.5"}, "Engine: mem_fraction is '0.5', expected a number or None"),
        ({"mem_fraction": True}, "Engine: mem_fraction is True, expected a number or None"),
        ({"batch_sizes": 8}, "Engine: batch_sizes is 8, expected a list or None"),
        ({"adapter": 3}, "Engine: adapter is 3, expected a string, a path or None"),
        ({"tuning": 3}, "Engine: tuning is 3, expected a string, a path, a dict or None"),
        ({"dtype": "bfloat16"}, "Engine: dtype is 'bfloat16', expected a dtype of torch or None"),
        ({"prefill_chunk": 2**31}, "Engine: prefill_chunk is 2147483648, expected an integer of 32 bits"),
        ({"num_slots": 10**30}, "Engine: num_slots is 1000000000000000000000000000000, expected an integer of 32 bits"),
        ({"trace": "a\0b"}, "Engine: trace is 'a\\x00b', expected a name that a file can have"),
        ({"tuning": "\ud800"}, "Engine: tuning is '\\ud800', expected a name that a file can have"),
        ({"tokenizer": Path("\ud800")}, "Engine: tokenizer is '\\ud800', expected a name that a file can have"),
        ({"tokenizer": b"x"}, "Engine: tokenizer is a bytes, expected one of transformers, a path or a hub id"),
        ({"device": 0}, "Engine: device is 0, expected a string, a device of torch or None"),
        ({"tokenizer": [1]}, "Engine: tokenizer is a list, expected one of transformers, a path or a hub id"),
        ({"batch_sizes": [1.5, 8]}, "Engine: batch_sizes is 1.5, expected an integer"),
        ({"page_size": 0}, "Engine: page_size is 0, expected at least 1"),
        ({"prefill_chunk": -1}, "Engine: prefill_chunk is -1, expected at least 1"),
        ({"dtype": torch.int8}, "Engine: dtype is torch.int8, expected one of torch.float32, torch.float16, "),
        ({"kv_dtype": "int8"}, "Engine: kv_dtype is 'int8', expected None (that of the weights), 'fp8_e4m3' or "),
        ({"rounds_in_flight": 16}, "Engine: rounds_in_flight is 16, expected 1 to 15"),
        ({"batch_sizes": [1, 2]}, "Engine: batch_sizes is [1, 2], expected rising sizes up to num_slots=8"),
        ({"batch_sizes": [4, 8], "batch_invariant": True}, "Engine: batch_sizes is [4, 8], expected one size with"),
        ({"adaptive": True, "batch_invariant": True}, "Engine: adaptive is set, expected not with batch_invariant"),
        (
            {"draft": Tree(reads_others=True), "batch_invariant": True},
            "Engine: batch_invariant is set, expected not wi",
        ),
        ({"mem_fraction": 0.5}, "Engine: mem_fraction is 0.5, expected None (device is cpu)"),
        ({"mem_fraction": 0.5, "num_pages": 9}, "Engine: num_pages is 9, expected None with mem_fraction"),
        ({"mem_fraction": 1.5, "machine": CUDA}, "Engine: mem_fraction is 1.5, expected above 0 and at most 1"),
        (
            {"num_pages": 128},
            "Engine: num_pages is 128, expected at least 129 "
            "(one request of max_len=2048 tokens and the 2 rows of a round must fit)",
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    assert refusal(**options).startswith(message)


def test_devices_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="Engine: device is meta, expected cpu or cuda"):
        Machine.of("meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Machine.of(None).device.type == "cpu"


# --- sizes that no machine has


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_slots": 10**9},
            "Engine: num_slots is 1000000000 (max_len=2048, num_pages=129000000000), which takes 8471652.0 GB "
            "(KV 8454144.0 GB, logits 4000.0 GB, slots ",
        ),
        ({"num_slots": 70_000, "max_len": 4000}, "Engine: num_slots is 70000 (max_len=4000, num_pages=17570000), "),
        ({"num_pages": 10**9}, "Engine: num_slots is 8 (max_len=2048, num_pages=1000000000), "),
        ({"max_len": 2**31 - 1}, "Engine: num_slots is 8 (max_len=2147483647, num_pages="),
        ({"draft": Tree(kv_numbers=10**9)}, "Engine: num_slots is 8 (max_len=2048, num_pages=1048), "),
        (
            {"num_slots": 70_000, "num_pages": 300, "machine": Machine(CPU.device, 5 * 10**8)},
            "Engine: num_slots is 70000 ",
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_sizes_that_no_machine_has(options: dict[str, Any], message: str) -> None:
    """At once, and without allocating anything."""
    got = refusal(**options)
    assert got.startswith(message), got
    machine = options.get("machine", CPU)
    assert got.endswith(f"expected at most the {machine.num_bytes / 1e9:.1f} GB of cpu")


def test_what_fits_is_not_refused() -> None:
    """To the byte: the pools, the logits of a round of all slots, the tables and the rings."""
    draft, options = Tree(), {"num_slots": 4, "max_len": 1000, "kv_dtype": None}
    got = resolve(draft, **options)
    kv = got.num_pages * got.page_size * 4 * (2 * 4 * 2 * 64 + 256)
    slots = 4 * 4 * (got.max_pages + 16 + 2 * 1000) + ring_bytes(4, 6, got.num_levels, 20)
    needed = kv + 4 * 32 * 1000 * 4 + slots
    assert resolve(draft, Machine(CPU.device, needed), **options) == dataclasses.replace(
        got, machine=Machine(CPU.device, needed)
    )
    assert "which takes" in refusal(draft, Machine(CPU.device, needed - 1), **options)


def test_ring_bytes_are_those_of_the_rings() -> None:
    state = make_slot_state(5, 100, 16, torch.empty(0))
    rings = Rings.create(state, max_batch=5, accept_width=7, num_levels=3, top_n=20, depth=RING_DEPTH)
    assert ring_bytes(5, 7, 3, 20) == rings.commands.nbytes + rings.results.nbytes
    assert (
        _C.command_words(5, 5, 16) == rings.commands.shape[1] and _C.result_words(5, 7, 3, 20) == rings.results.shape[1]
    )


def test_the_host_has_memory() -> None:
    assert 10**8 < host_bytes() < 10**15


def test_impossible_config_is_refused_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_random_model(tmp_path / "target", "llama")
    monkeypatch.setattr("specdec_kernels.engine.startup.open_language_model", None)
    draft = Ngram()
    with pytest.raises(ValueError, match=r"Engine: num_slots is 1000000000 \(max_len=512, .* of cpu$"):
        Engine(folder, draft=draft, num_slots=10**9, device="cpu")
    assert not draft.is_open


# --- traces


def test_unwritable_trace_is_refused_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_random_model(tmp_path / "target", "llama")
    monkeypatch.setattr("specdec_kernels.engine.startup.open_language_model", None)
    for trace, reason in ((tmp_path / "none" / "t.json", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(ValueError) as error:
            Engine(folder, trace=trace, device="cpu")
        assert str(error.value) == f"Engine: trace is {trace}, expected a file that can be written ({reason})"


@pytest.mark.parametrize("trace", ["folder/t.json", "/dev/full"])
def test_trace_write_failure_keeps_outputs(trace: str, tmp_path: Path) -> None:
    """Its folder is gone, or the disk is full."""
    folder = save_random_model(tmp_path / "target", "llama")
    path = tmp_path / trace
    if trace == "/dev/full" and not path.exists():
        pytest.skip("no /dev/full here")
    if trace != "/dev/full":
        path.parent.mkdir()
    with Engine(folder, trace=path, device="cpu", max_len=64) as engine:
        if trace != "/dev/full":
            path.unlink()
            path.parent.rmdir()
        with pytest.warns(RuntimeWarning, match=f"^Engine: trace: cannot write {path}$"):
            (output,) = engine.generate([[5, 6, 7]], SamplingParams(8, ignore_eos=True))
    assert len(output.tokens) == 8


def test_trace_is_written(tmp_path: Path) -> None:
    folder = save_random_model(tmp_path / "target", "llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with Engine(folder, trace=tmp_path / "t.json", device="cpu", max_len=64) as engine:
            assert (tmp_path / "t.json").read_bytes() == b""
            engine.generate([[5, 6, 7]], SamplingParams(8))
    assert (tmp_path / "t.json").read_text().endswith("]}\n")


# --- a draft outlives its engine


def test_a_draft_whose_engine_is_gone_is_closed(tmp_path: Path) -> None:
    folder, draft = save_random_model(tmp_path / "target", "llama"), Ngram()
    for _ in range(2):
        Engine(folder, draft=draft, device="cpu", max_len=64).generate([[5, 6, 7]], SamplingParams(4))
        assert not draft.is_open


@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
def test_a_share_that_holds_nothing_leaves_the_draft_closed(tmp_path: Path) -> None:
    folder, draft = save_random_model(tmp_path / "target", "llama"), Ngram()
    with pytest.raises(ValueError, match="which leaves room for 0 pages"):
        Engine(folder, draft=draft, device="cuda", mem_fraction=1e-6, max_len=64)
    assert not draft.is_open
