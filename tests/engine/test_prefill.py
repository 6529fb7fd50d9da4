"""Prefill passes: what they leave depends on their chunks alone, not on the shape they run in."""

from __future__ import annotations

import pytest
import torch

from specdec_kernels import _C
from specdec_kernels.engine import Engine
from specdec_kernels.engine.device.prefill import Shape, pack
from specdec_kernels.engine.device.prefill_graphs import PIECE, Passes, captured_shapes
from specdec_kernels.engine.host_tensors import to_device
from specdec_kernels.engine.startup import on_stream
from support.devices import HAS_CUDA
from support.exhaustive import covering
from support.manual_rounds import DRAFTS, MAX_LEN, every_draft, kv_of, make_engine, prompts, slot_state

SLOTS = 4


def chunks_of(engine: Engine) -> list[_C.PrefillChunk]:
    """Return three slots with pages; the first has a longer prefix."""
    chunks = []
    for slot, (start, text) in enumerate(zip((7, 0, 0), (prompts()[5], prompts()[1], prompts()[2]), strict=True)):
        engine.core.executor.begin(slot, _C.AdmittedRequest(id=slot, tokens=text))
        chunks.append(_C.PrefillChunk(slot=slot, start=start, tokens=text[start:]))
    prefix = _C.PrefillChunk(slot=0, start=0, tokens=prompts()[5][:8])
    engine.core.executor.passes.launch(*packed(engine, [prefix], Shape(1, 7, 1)))
    return chunks


def packed(engine: Engine, chunks: list[_C.PrefillChunk], shape: Shape) -> tuple[torch.Tensor, Shape]:
    return to_device(pack(chunks, shape), engine.device), shape


def expect_same(engine: Engine, other: Engine) -> None:
    torch.testing.assert_close(engine.state.seq_lens, other.state.seq_lens)
    assert not engine.state.status.any() and not other.state.status.any()
    for slot in range(SLOTS):
        got, want = slot_state(engine, slot), slot_state(other, slot)
        for key in got:
            torch.testing.assert_close(torch.tensor(got[key]), torch.tensor(want[key]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(kv_of(engine, slot), kv_of(other, slot), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "shape"), covering(DRAFTS, [(12, 16, 3), (7, 64, 4), (3, 100, 3), (110, 1, 4)]))
def test_prefill_padding_changes_nothing(name: str, shape: tuple[int, int, int], device: torch.device) -> None:
    engine, other = (make_engine(name, device, num_slots=SLOTS, cuda_graph=False) for _ in range(2))
    engine.core.executor.passes.launch(*packed(engine, chunks_of(engine), Shape(*shape)))
    other.core.executor.passes.run(chunks_of(other))
    expect_same(engine, other)
    assert other.state.seq_lens.tolist() == [59, 39, 8, 0]


@pytest.mark.parametrize("sizes", [(2048, 64, 4096), (2048, 3, 128), (64, 8, 2048), (5, 1, 2), (100_000, 256, 100_000)])
def test_prefill_captured_shapes(sizes: tuple[int, int, int]) -> None:
    """There is one for any prompts that one call may have, a quarter larger at most."""
    prefill_chunk, num_slots, max_len = sizes
    shapes = captured_shapes(prefill_chunk, num_slots, max_len)
    most = min(-(-prefill_chunk // PIECE), num_slots * -(-(max_len - 1) // PIECE))
    pieces = [shape.pieces for shape in shapes]
    assert pieces == sorted(set(pieces)) and pieces[-1] == most and len(pieces) < 60
    assert all(shape.length == PIECE and shape.chunks == min(shape.pieces, num_slots) for shape in shapes)
    for count in range(1, most + 1):
        assert min(size for size in pieces if size >= count) <= max(1.25 * count, 1)


def test_prefill_pass_shape() -> None:
    """A captured one, unless it has many more rows."""
    passes = Passes.__new__(Passes)
    passes.captured = dict.fromkeys(captured_shapes(2048, 64, 4096))  # type: ignore[arg-type]

    def pieces(lengths: list[int]) -> int | None:
        shape = passes.captured_shape(lengths, Shape.fitting(lengths).rows)
        return shape and shape.pieces

    assert pieces([1]) == 1 and pieces([64]) == 1 and pieces([65]) == 2 and pieces([320]) == 5 and pieces([2048]) == 32
    assert pieces([10, 10, 10]) == 3 and pieces([3] * 5) is None and pieces([320] * 6) == 32
    assert pieces([64] * 32) == 32 and pieces([60] * 34) is None and pieces([33] * 62) is None
    assert pieces([2049]) is None


@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
@every_draft
def test_captured_passes_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not adaptive: rounds that are timed leave something in slots that nobody holds.
    engine = make_engine(name, "cuda", num_slots=SLOTS, adaptive=False)
    other = make_engine(name, "cuda", num_slots=SLOTS, adaptive=False, cuda_graph=False)
    assert len(engine.core.executor.passes.captured) == len(captured_shapes(2048, SLOTS, MAX_LEN))
    with torch.inference_mode(), on_stream(engine.core.stream):
        chunks = chunks_of(engine)
        monkeypatch.setattr(Passes, "launch", lambda *_: pytest.fail("launched call by call"))
        for passes in (chunks[:1], chunks[1:]):
            engine.core.executor.prefill(passes)
    monkeypatch.undo()
    with torch.inference_mode(), on_stream(other.core.stream):
        other.core.executor.prefill(chunks_of(other))
    torch.cuda.synchronize()
    expect_same(engine, other)


@pytest.mark.skipif(not HAS_CUDA, reason="no GPU here")
def test_prefill_without_graphs_captures_nothing() -> None:
    assert not make_engine("eagle3-tree", "cuda", cuda_graph=False).core.executor.passes.captured
