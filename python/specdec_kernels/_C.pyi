"""The compiled module. `ops.py` documents the arguments; the order here is the order there, `stream` first."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

Tensor: TypeAlias = Any
PagePool: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]  # ops.PagePool

version: str
cuda_version: str | None
cuda_architectures: str | None

# --- draft
def select_topk(
    stream: int | None, logits: Tensor, k: int, id_map: Tensor | None, out_ids: Tensor, out_logprobs: Tensor
) -> None: ...
def sample_draft(
    stream: int | None,
    logits: Tensor,
    k: int,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    slots: Tensor | None,
    id_map: Tensor | None,
    out_ids: Tensor,
    out_logprobs: Tensor,
) -> None: ...
def expand_root(
    stream: int | None,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    seq_lens: Tensor,
    num_steps: int,
    slots: Tensor | None,
    position_offset: int,
    out_cand_tokens: Tensor,
    out_cand_parents: Tensor,
    out_cand_scores: Tensor,
    out_frontier: Tensor,
    out_tokens: Tensor,
    out_positions: Tensor,
    out_mask: Tensor,
) -> None: ...
def expand_tree(
    stream: int | None,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    step: int,
    cand_tokens: Tensor,
    cand_parents: Tensor,
    cand_scores: Tensor,
    frontier: Tensor,
    mask: Tensor,
    seq_lens: Tensor,
    slots: Tensor | None,
    position_offset: int,
    out_tokens: Tensor,
    out_parent_rows: Tensor,
    out_positions: Tensor,
) -> None: ...
def extend_rows(
    stream: int | None,
    tokens: Tensor,
    path: Tensor,
    num_valid: Tensor,
    seq_lens_before: Tensor,
    num_nodes: int,
    slots: Tensor | None,
    position_offset: int,
    out_tokens: Tensor,
    out_positions: Tensor,
    out_node_rows: Tensor,
    out_last_rows: Tensor,
    out_kept_slots: Tensor,
) -> None: ...

# --- tree
def build_tree(
    stream: int | None,
    cand_tokens: Tensor,
    cand_parents: Tensor,
    cand_scores: Tensor,
    root_tokens: Tensor,
    seq_lens: Tensor,
    num_draft_tokens: int,
    slots: Tensor | None,
    order: str,
    status: Tensor | None,
    out_tokens: Tensor,
    out_parents: Tensor,
    out_positions: Tensor,
    out_first_child: Tensor,
    out_next_sibling: Tensor,
    out_mask: Tensor,
    out_num_nodes: Tensor,
) -> None: ...
def build_tree_from_parents(
    stream: int | None,
    tokens: Tensor,
    parents: Tensor,
    seq_lens: Tensor,
    num_nodes: Tensor | None,
    slots: Tensor | None,
    status: Tensor | None,
    out_tokens: Tensor,
    out_parents: Tensor,
    out_positions: Tensor,
    out_first_child: Tensor,
    out_next_sibling: Tensor,
    out_mask: Tensor,
    out_num_nodes: Tensor,
) -> None: ...
def build_tree_from_mask(
    stream: int | None,
    tokens: Tensor,
    mask: Tensor,
    seq_lens: Tensor,
    num_nodes: Tensor | None,
    slots: Tensor | None,
    status: Tensor | None,
    out_tokens: Tensor,
    out_parents: Tensor,
    out_positions: Tensor,
    out_first_child: Tensor,
    out_next_sibling: Tensor,
    out_mask: Tensor,
    out_num_nodes: Tensor,
) -> None: ...
def merge_trees(
    stream: int | None,
    a_tokens: Tensor,
    a_parents: Tensor,
    a_positions: Tensor,
    a_num_nodes: Tensor,
    a_scores: Tensor,
    b_tokens: Tensor,
    b_parents: Tensor,
    b_positions: Tensor,
    b_num_nodes: Tensor,
    b_scores: Tensor,
    num_draft_tokens: int,
    out_tokens: Tensor,
    out_parents: Tensor,
    out_positions: Tensor,
    out_first_child: Tensor,
    out_next_sibling: Tensor,
    out_mask: Tensor,
    out_num_nodes: Tensor,
    out_scores: Tensor,
) -> None: ...

# --- layers
def norm_rows(
    stream: int | None,
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    out_sum: Tensor | None,
    out: Tensor,
) -> None: ...
def pair_rows(
    stream: int | None,
    embeddings: Tensor,
    tokens: Tensor,
    embedding_weight: Tensor,
    features: Tensor,
    feature_rows: Tensor | None,
    feature_weight: Tensor,
    eps: float,
    out: Tensor,
    out_features: Tensor,
) -> None: ...
def gate_rows(stream: int | None, x: Tensor, out: Tensor) -> None: ...
def linear_rows(
    stream: int | None, x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, out: Tensor
) -> None: ...
def has_wgmma() -> bool: ...
def many_rows_fill(rows: int, weight_rows: int) -> bool: ...
def rotate_qkv(
    stream: int | None,
    qkv: Tensor,
    rotations: Tensor,
    positions: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    start_lens: Tensor,
    row_offset: int,
    slots: Tensor | None,
    num_valid: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    page_refs: Tensor | None,
    k_scale: float,
    v_scale: float,
    status: Tensor | None,
    out_q: Tensor,
) -> None: ...

# --- attention
def tree_attention(
    stream: int | None,
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    slots: Tensor | None,
    q_lens: Tensor | None,
    cu_seqlens_q: Tensor | None,
    tail_len: int | None,
    mask: Tensor | None,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
    k_scale: float,
    v_scale: float,
    fixed_split: int | None,
    out: Tensor,
    lse: Tensor | None,
    workspace: Tensor | None,
    status: Tensor | None,
) -> None: ...
def tree_attention_workspace(
    q: Tensor, k_pool: Tensor, page_table: Tensor, cu_seqlens_q: Tensor | None, fixed_split: int | None
) -> int: ...

# --- verify
def verify_tree(
    stream: int | None,
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    positions: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    num_nodes: Tensor,
    accept_width: int,
    slots: Tensor | None,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor | None,
    vocab_mask: Tensor | None,
    logit_bias: Tensor | None,
    draft_logits: Tensor | None,
    draft_rows: Tensor | None,
    draft_temperature: Tensor | None,
    id_map: Tensor | None,
    block_verification: bool,
    workspace: Tensor | None,
    status: Tensor | None,
    out_tokens: Tensor,
    out_len: Tensor,
    out_path: Tensor,
) -> None: ...
def mask_stops(
    stream: int | None,
    logits: Tensor,
    positions: Tensor,
    stop_tokens: Tensor,
    stops_from: Tensor,
    slots: Tensor | None,
) -> None: ...
def score_tokens(
    stream: int | None,
    logits: Tensor,
    path: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    top_n: int,
    slots: Tensor | None,
    num_logprobs: Tensor | None,
    out_logprobs: Tensor,
    out_top_ids: Tensor,
    out_top_logprobs: Tensor,
) -> None: ...
def commit_tokens(
    stream: int | None,
    out_tokens: Tensor,
    out_len: Tensor,
    stop_tokens: Tensor,
    remaining: Tensor,
    max_lens: Tensor,
    seq_lens: Tensor,
    seq_lens_before: Tensor,
    root_tokens: Tensor,
    finish_reasons: Tensor,
    slots: Tensor | None,
    status: Tensor | None,
    out_num_valid: Tensor,
) -> None: ...

# --- kv
def alloc_pages(
    stream: int | None,
    pool: PagePool,
    lens: Tensor,
    reserve: int,
    slots: Tensor | None,
    status: Tensor | None,
) -> None: ...
def free_pages(
    stream: int | None,
    pool: PagePool,
    keep_lens: Tensor,
    slots: Tensor | None,
    status: Tensor | None,
) -> None: ...
def fork_pages(
    stream: int | None,
    pool: PagePool,
    src_slots: Tensor,
    dst_slots: Tensor,
    lens: Tensor,
    status: Tensor | None,
    out_num_rows: Tensor,
) -> None: ...
def write_kv(
    stream: int | None,
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    start_lens: Tensor,
    row_offset: int,
    slots: Tensor | None,
    num_valid: Tensor | None,
    cu_seqlens_q: Tensor | None,
    page_refs: Tensor | None,
    k_scale: float,
    v_scale: float,
    status: Tensor | None,
) -> None: ...
def move_kv(
    stream: int | None,
    k_pools: Tensor,
    v_pools: Tensor,
    page_table: Tensor,
    path: Tensor,
    num_valid: Tensor,
    seq_lens_before: Tensor,
    slots: Tensor | None,
    page_refs: Tensor | None,
    status: Tensor | None,
) -> None: ...
def copy_kv(
    stream: int | None,
    k_pools: Tensor,
    v_pools: Tensor,
    page_table: Tensor,
    src_slots: Tensor,
    dst_slots: Tensor,
    lens: Tensor,
    num_rows: Tensor,
    page_refs: Tensor | None,
    status: Tensor | None,
) -> None: ...

# --- round
def apply_commands(
    stream: int | None,
    commands: Tensor,
    num_applied: Tensor,
    started_at: Tensor,
    seq_lens: Tensor,
    root_tokens: Tensor,
    remaining: Tensor,
    stop_tokens: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    stops_from: Tensor,
    num_logprobs: Tensor,
    finish_reasons: Tensor,
    status: Tensor,
    out_slots: Tensor,
    out_given_back: Tensor,
) -> None: ...
def publish_results(
    stream: int | None,
    results: Tensor,
    num_published: Tensor,
    started_at: Tensor,
    out_tokens: Tensor,
    out_len: Tensor,
    out_path: Tensor,
    num_nodes: Tensor,
    finish_reasons: Tensor,
    status: Tensor,
    slots: Tensor | None,
    logprobs: Tensor | None,
    top_ids: Tensor | None,
    top_logprobs: Tensor | None,
    num_logprobs: Tensor | None,
) -> None: ...

# --- compat
def build_tree_kernel_efficient(
    stream: int | None,
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None: ...
def reconstruct_indices_from_tree_mask(
    stream: int | None,
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None: ...
def verify_tree_greedy(
    stream: int | None,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None: ...
def tree_speculative_sampling_target_only(
    stream: int | None,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float,
    threshold_acc: float,
) -> None: ...
def chain_speculative_sampling(
    stream: int | None,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    block_verification: bool,
) -> None: ...
def rejection_sample(
    stream: int | None,
    draft_token_ids: Tensor,
    max_spec_len: int,
    cu_num_draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_logits: Tensor,
    bonus_token_ids: Tensor,
    temperature: Tensor | None,
    uniform_probs: Tensor,
    final_probs: Tensor,
    output_token_ids: Tensor,
) -> None: ...

# --- ngram
class NgramIndex:
    def __init__(
        self, max_tokens: int, num_slots: int, max_len: int, num_threads: int, memory: Tensor | None
    ) -> None: ...
    @staticmethod
    def load(fd: int, num_slots: int | None, max_len: int | None, num_threads: int) -> NgramIndex: ...
    def copy(self, memory: Tensor | None) -> NgramIndex: ...
    def save(self, fd: int) -> int: ...
    def begin(self, slot: int, group: int, is_private: bool, request: int | None) -> None: ...
    def length(self, slot: int) -> int: ...
    def insert(self, tokens: Tensor, slot: int | None, group: int, start: int | None) -> None: ...
    def extend(self, tokens: Tensor, lengths: Tensor, slots: Tensor | None, match_len: Tensor | None) -> None: ...
    def release(self, slot: int) -> None: ...
    def draft(
        self,
        slots: Tensor | None,
        seq_lens: Tensor,
        num_draft_tokens: int,
        chain: bool,
        min_prob: float,
        min_match: int,
        own_weight: float,
        group_weight: float,
        global_weight: float,
        recency: float,
        out_tokens: Tensor,
        out_parents: Tensor,
        out_positions: Tensor,
        out_first_child: Tensor,
        out_next_sibling: Tensor,
        out_mask: Tensor,
        out_num_nodes: Tensor,
        out_scores: Tensor,
        out_match_len: Tensor,
    ) -> None: ...
    def clear(self) -> None: ...
    def statistics(self) -> tuple[int, int, int, float, int, int, int, int, list[int], list[int], int]: ...
    def digest(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def device_words(self) -> int: ...

# --- scheduler
class _Executor(Protocol):
    """What the scheduler drives: csrc/scheduler/executor.h says when each call comes, scheduler.h what a raise does."""

    def begin(self, slot: int, request_id: int, text: list[int]) -> None: ...
    def prefill(self, chunks: list[tuple[int, int, list[int]]]) -> None: ...  # slot, start, tokens each
    def activate(self, slots: list[int]) -> None: ...
    def launch(self, batch: int, num_nodes: int) -> None: ...
    def deactivate(self, slots: list[int]) -> None: ...
    def emit(self, emissions: list[Emission]) -> None: ...
    def progress(self) -> tuple[int, int]: ...

# Request id, new tokens, finish reason, rounds, drafted, accepted, status; and where they were asked for, the tokens'
# log-probabilities, the ids of the best alternatives to each, and theirs.
Emission: TypeAlias = tuple[int, list[int], int, int, int, int, int, tuple[list[float], list[int], list[float]] | None]

class RoundCosts:
    """What a round costs on the machine that runs it.

    Attributes:
        batches: rising numbers of rows that a round may have (of a round with fewer, the next one counts).
        nodes: rising numbers of nodes that its trees may have, root included.
        us: us[i][j] microseconds of a round with batches[i] rows of nodes[j] nodes.
    """

    def __init__(self, batches: Sequence[int], nodes: Sequence[int], us: Sequence[Sequence[float]]) -> None: ...
    @property
    def batches(self) -> list[int]: ...
    @property
    def nodes(self) -> list[int]: ...
    @property
    def us(self) -> list[list[float]]: ...
    def choose_num_nodes(self, batch: int, accepted: Sequence[float]) -> int:
        """The one of `nodes` that promises most tokens a second, of equal ones the least.

        A round of nodes[j] gives each row one token, and as many more as it accepts drafts: accepted[j], in the mean.
        Where 1 is among the nodes, not to draft is a choice. ValueError: a batch below 1.
        """

class Scheduler:
    """Continuous batching in C++.

    `commands` and `results` are the host's ends of the rings that `apply_commands` and `publish_results` work on:
    contiguous int32, pinned where the device is a GPU. `graphs` are captured rounds by batch and number of nodes (0 and
    0: `apply_commands` and `free_pages` alone) as raw cudaGraph_t, launched on `stream`; others are `executor.launch`
    calls. Of several `nodes` the last one counts until `measure_rounds`.
    """

    def __init__(
        self,
        executor: _Executor,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        max_len: int,
        reserve: int,
        accept_width: int,
        max_stops: int,
        max_logprobs: int = -1,
        prefill_chunk: int,
        prefill_requests: int,
        rounds_in_flight: int,
        batch_sizes: Sequence[int],
        nodes: Sequence[int],
        commands: Tensor,
        results: Tensor,
        stream: int | None = None,
        graphs: Mapping[tuple[int, int], int] = {},
        trace: bool = False,
    ) -> None: ...
    def submit(
        self,
        prompt: Sequence[int] | Tensor,
        max_new_tokens: int,
        stop_tokens: Sequence[int] | Tensor = (),
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        min_new_tokens: int = 0,
        num_logprobs: int = -1,
        streams: bool = True,
    ) -> int: ...
    def cancel(self, request_id: int) -> bool: ...
    def abort_all(self) -> None: ...
    def measure_rounds(self) -> None: ...
    def step(self) -> bool: ...
    def run_until_idle(self) -> None: ...
    def wait_for_work(self, timeout: float) -> bool: ...
    def drain(self, timeout: float) -> bool: ...
    def write_trace(self, path: str) -> None: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_free_pages_estimate(self) -> int: ...
    @property
    def num_retractions(self) -> int: ...
    @property
    def times(self) -> tuple[int, int, int, int, int, int, int, int, int]:
        """Rounds, rows; nanoseconds of host work, of waiting, prefill and emit, of rounds on the device; of those
        launched while another was in flight, with nothing in between; of the gaps before these."""
    @property
    def rounds_by_rung(self) -> list[int]: ...
    @property
    def costs(self) -> RoundCosts | None: ...

# --- boundary timing
def noop1(stream: int | None, a: Tensor) -> int: ...
def noop4(stream: int | None, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> int: ...
def noop8(
    stream: int | None, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor, h: Tensor
) -> int: ...
