"""The compiled module. Written by packaging/write_stub.py; do not edit.

`specdec_kernels.ops` documents the arguments of the ops.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

Tensor: TypeAlias = Any
PagePool: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int]  # ops.PagePool

version: str
cuda_version: str | None
cuda_architectures: str | None

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
    calibration: Tensor | None,
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
    calibration: Tensor | None,
    out_tokens: Tensor,
    out_parent_rows: Tensor,
    out_positions: Tensor,
) -> None: ...
def expand_trellis(
    stream: int | None,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    num_candidates: int,
    predecessors: Tensor | None,
    successors: Tensor | None,
    gates: Tensor | None,
    root_tokens: Tensor | None,
    id_map: Tensor | None,
    calibration: Tensor | None,
    width: int,
    out_tokens: Tensor,
    out_parents: Tensor,
    out_scores: Tensor,
) -> None: ...
def update_calibration(
    stream: int | None,
    table: Tensor,
    counts: Tensor,
    tokens: Tensor,
    parents: Tensor,
    positions: Tensor,
    num_nodes: Tensor,
    scores: Tensor,
    emitted: Tensor,
    num_valid: Tensor,
) -> None: ...
def draft_extend_inputs(
    stream: int | None,
    tokens: Tensor,
    path: Tensor,
    num_valid: Tensor,
    prefix_lens: Tensor,
    num_nodes: int,
    slots: Tensor | None,
    cu_seqlens_q: Tensor | None,
    position_offset: int,
    out_tokens: Tensor,
    out_positions: Tensor,
    out_node_rows: Tensor,
    out_last_rows: Tensor,
    out_kept_slots: Tensor,
) -> None: ...
def append_draft_backlog(
    stream: int | None,
    tokens: Tensor,
    path: Tensor,
    num_valid: Tensor,
    backlog_lens: Tensor,
    backlog_tokens: Tensor,
    features: Tensor | None,
    backlog_features: Tensor | None,
    slots: Tensor | None,
    cu_seqlens_q: Tensor | None,
) -> None: ...
def build_tree(
    stream: int | None,
    cand_tokens: Tensor,
    cand_parents: Tensor,
    cand_scores: Tensor,
    root_tokens: Tensor,
    seq_lens: Tensor,
    num_nodes: int,
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
    out_scores: Tensor | None,
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
    num_nodes: int,
    out_tokens: Tensor,
    out_parents: Tensor,
    out_positions: Tensor,
    out_first_child: Tensor,
    out_next_sibling: Tensor,
    out_mask: Tensor,
    out_num_nodes: Tensor,
    out_scores: Tensor,
) -> None: ...
def allocate_nodes(
    stream: int | None,
    scores: Tensor,
    budget: int,
    slots: Tensor | None,
    max_nodes: Tensor | None,
    finish_reasons: Tensor | None,
    status: Tensor | None,
    budget_levels: Tensor | None,
    level_limits: Tensor | None,
    out_num_nodes: Tensor,
    out_cu_seqlens: Tensor,
    out_expected: Tensor,
    out_cuts: Tensor,
) -> None: ...
def pack_trees(
    stream: int | None,
    tokens: Tensor,
    parents: Tensor,
    positions: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    mask: Tensor,
    num_nodes: Tensor,
    scores: Tensor,
    kept: Tensor,
    cu_seqlens: Tensor,
    num_rows: int,
    out_tokens: Tensor,
    out_positions: Tensor,
    out_mask: Tensor,
    out_scores: Tensor,
) -> None: ...
def add_rms_norm(
    stream: int | None,
    x: Tensor,
    weight: Tensor,
    eps: float,
    topk_weights: Tensor | None,
    residual: Tensor | None,
    out_sum: Tensor | None,
    out_scales: Tensor | None,
    out: Tensor,
) -> None: ...
def rms_norm_concat(
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
def gated_rms_norm(
    stream: int | None,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    gates_first: bool,
    activation: str,
    out: Tensor,
) -> None: ...
def silu_and_mul(stream: int | None, x: Tensor, out: Tensor) -> None: ...
def small_m_gemm(
    stream: int | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_scales: Tensor | None,
    weight_scales: Tensor | None,
    gated: bool,
    plan: str | None,
    out: Tensor,
) -> None: ...
def small_m_bmm(stream: int | None, x: Tensor, weight: Tensor, out: Tensor) -> None: ...
def small_m_gemm_plan(x: Tensor, weight: Tensor, gated: bool) -> str: ...
def small_m_gemm_plan_of_sizes(rows: int, outs: int, ins: int, bits: int, gated: bool, has_wgmma: bool) -> str: ...
def moe_grouped_gemm(
    stream: int | None,
    x: Tensor,
    weight: Tensor,
    sorted_pairs: Tensor,
    expert_ends: Tensor,
    x_scales: Tensor | None,
    weight_scales: Tensor | None,
    shared_weight: Tensor | None,
    gated: bool,
    routing_ready: bool,
    out: Tensor,
) -> None: ...
def moe_route(
    stream: int | None,
    scores: Tensor,
    top_k: int,
    renormalize: bool,
    activation: str,
    bias: Tensor | None,
    scale: float,
    eps: float,
    n_group: int,
    topk_group: int,
    num_shared: int,
    shared_gate: Tensor | None,
    out_topk_ids: Tensor,
    out_topk_weights: Tensor,
    out_sorted_pairs: Tensor,
    out_expert_ends: Tensor,
) -> None: ...
def moe_combine(stream: int | None, expert_outputs: Tensor, topk_weights: Tensor, out: Tensor) -> None: ...
def quantize_fp8(
    stream: int | None, x: Tensor, group_size: int | None, scale: Tensor | None, out: Tensor, out_scales: Tensor
) -> None: ...
def dequantize(stream: int | None, qweight: Tensor, scales: Tensor, out: Tensor) -> None: ...
def rope_qkv_write_kv(
    stream: int | None,
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    row_offset: int,
    slots: Tensor | None,
    num_valid: Tensor | None,
    cu_seqlens_q: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    page_refs: Tensor | None,
    k_scale: float,
    v_scale: float,
    status: Tensor | None,
    out: Tensor,
) -> None: ...
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
    max_kv_len: int | None,
    plan: str | None,
    out: Tensor,
    lse: Tensor | None,
    workspace: Tensor | None,
    status: Tensor | None,
) -> None: ...
def tree_attention_workspace(
    q: Tensor,
    k_pool: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor | None,
    fixed_split: int | None,
    max_kv_len: int | None,
    plan: str | None,
) -> int: ...
def tree_attention_plan(
    q: Tensor,
    k_pool: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor | None,
    fixed_split: int | None,
    max_kv_len: int | None,
    plan: str | None,
) -> str: ...
def write_latent(
    stream: int | None,
    x: Tensor,
    norm: Tensor,
    eps: float,
    kv_pool: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    cos_sin: Tensor | None,
    positions: Tensor | None,
    interleaved: bool,
    row_offset: int,
    slots: Tensor | None,
    num_valid: Tensor | None,
    cu_seqlens_q: Tensor | None,
    page_refs: Tensor | None,
    kv_scale: float,
    q: Tensor | None,
    q_norm: Tensor | None,
    q_out: Tensor | None,
    status: Tensor | None,
) -> None: ...
def rope_heads(
    stream: int | None, x: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool, out: Tensor
) -> None: ...
def mla_tree_attention(
    stream: int | None,
    q: Tensor,
    kv_pool: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    latent_dim: int,
    slots: Tensor | None,
    q_lens: Tensor | None,
    cu_seqlens_q: Tensor | None,
    tail_len: int | None,
    mask: Tensor | None,
    indices: Tensor | None,
    scale: float,
    window: int | None,
    kv_scale: float,
    fixed_split: int | None,
    max_kv_len: int | None,
    plan: str | None,
    out: Tensor,
    lse: Tensor | None,
    workspace: Tensor | None,
    status: Tensor | None,
) -> None: ...
def mla_tree_attention_workspace(
    q: Tensor,
    kv_pool: Tensor,
    page_table: Tensor,
    latent_dim: int,
    cu_seqlens_q: Tensor | None,
    indices: Tensor | None,
    fixed_split: int | None,
    max_kv_len: int | None,
    plan: str | None,
) -> int: ...
def mla_tree_attention_plan(
    q: Tensor,
    kv_pool: Tensor,
    page_table: Tensor,
    latent_dim: int,
    cu_seqlens_q: Tensor | None,
    indices: Tensor | None,
    fixed_split: int | None,
    max_kv_len: int | None,
    plan: str | None,
) -> str: ...
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
    cu_seqlens_q: Tensor | None,
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
    plan: str | None,
    workspace: Tensor | None,
    status: Tensor | None,
    out_tokens: Tensor,
    out_num_valid: Tensor,
    out_path: Tensor,
) -> None: ...
def verify_tree_workspace(
    logits: Tensor, num_nodes: int | None, temperature: Tensor | None, draft_logits: Tensor | None, plan: str | None
) -> int: ...
def verify_tree_plan(
    logits: Tensor, num_nodes: int | None, temperature: Tensor | None, draft_logits: Tensor | None, plan: str | None
) -> str: ...
def verify_plan(
    batch: int,
    num_nodes: int,
    vocab: int,
    logit_bytes: int,
    sampled: bool,
    rejects: bool,
    num_sms: int,
    is_hopper_or_later: bool,
) -> tuple[str, int]: ...
def edit_logits(
    stream: int | None,
    logits: Tensor,
    mask: Tensor,
    tokens: Tensor,
    kinds: Tensor,
    bias: Tensor,
    counts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    vocab_mask: Tensor | None,
    slots: Tensor | None,
    cu_seqlens_q: Tensor | None,
) -> None: ...
def mask_stops(
    stream: int | None,
    logits: Tensor,
    positions: Tensor,
    stop_tokens: Tensor,
    stops_from: Tensor,
    slots: Tensor | None,
    cu_seqlens_q: Tensor | None,
) -> None: ...
def score_tokens(
    stream: int | None,
    logits: Tensor,
    path: Tensor,
    tokens: Tensor,
    num_valid: Tensor,
    top_n: int,
    slots: Tensor | None,
    num_logprobs: Tensor | None,
    cu_seqlens_q: Tensor | None,
    out_logprobs: Tensor,
    out_top_ids: Tensor,
    out_top_logprobs: Tensor,
) -> None: ...
def commit_tokens(
    stream: int | None,
    tokens: Tensor,
    num_valid: Tensor,
    stop_tokens: Tensor,
    remaining: Tensor,
    max_seq_lens: Tensor,
    seq_lens: Tensor,
    prefix_lens: Tensor,
    root_tokens: Tensor,
    finish_reasons: Tensor,
    slots: Tensor | None,
    status: Tensor | None,
    counts: Tensor | None,
    out: Tensor,
) -> None: ...
def alloc_pages(
    stream: int | None, pool: PagePool, seq_lens: Tensor, reserve: int, slots: Tensor | None, status: Tensor | None
) -> None: ...
def free_pages(
    stream: int | None,
    pool: PagePool,
    prefix_lens: Tensor,
    window: int | None,
    slots: Tensor | None,
    status: Tensor | None,
) -> None: ...
def fork_pages(
    stream: int | None,
    pool: PagePool,
    src_slots: Tensor,
    dst_slots: Tensor,
    prefix_lens: Tensor,
    status: Tensor | None,
    out: Tensor,
) -> None: ...
def assign_pages(stream: int | None, pool: PagePool, src_entries: Tensor, dst_entries: Tensor) -> None: ...
def write_kv(
    stream: int | None,
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
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
    prefix_lens: Tensor,
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
    prefix_lens: Tensor,
    num_rows: Tensor,
    page_refs: Tensor | None,
    status: Tensor | None,
) -> None: ...
def set_pending_paths(
    stream: int | None,
    nodes: Tensor,
    num_nodes: Tensor,
    parity: Tensor,
    path: Tensor,
    num_valid: Tensor,
    slots: Tensor | None,
    status: Tensor | None,
) -> None: ...
def compute_gates(
    stream: int | None,
    a: Tensor,
    b: Tensor | None,
    decay: Tensor,
    dt_bias: Tensor,
    dt_min: float | None,
    dt_max: float | None,
    g: Tensor,
    beta: Tensor,
) -> None: ...
def tree_recurrence(
    stream: int | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    state: Tensor,
    records_k: Tensor,
    records_u: Tensor,
    records_g: Tensor,
    nodes: Tensor,
    num_nodes: Tensor,
    parity: Tensor,
    prefix_lens: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor | None,
    slots: Tensor | None,
    scale: float | None,
    l2norm_eps: float | None,
    delta_rule: bool,
    out: Tensor,
    status: Tensor | None,
) -> None: ...
def commit_recurrence(
    stream: int | None,
    state: Tensor,
    records_k: Tensor,
    records_u: Tensor,
    records_g: Tensor,
    nodes: Tensor,
    num_nodes: Tensor,
    parity: Tensor,
    slots: Tensor | None,
    status: Tensor | None,
) -> None: ...
def tree_conv1d(
    stream: int | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    records: Tensor,
    nodes: Tensor,
    num_nodes: Tensor,
    parity: Tensor,
    prefix_lens: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor | None,
    slots: Tensor | None,
    activation: str | None,
    out: Tensor,
    status: Tensor | None,
) -> None: ...
def commit_conv1d(
    stream: int | None,
    window: Tensor,
    records: Tensor,
    nodes: Tensor,
    num_nodes: Tensor,
    parity: Tensor,
    slots: Tensor | None,
    status: Tensor | None,
) -> None: ...
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
    max_nodes: Tensor,
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
    tokens: Tensor,
    num_valid: Tensor,
    num_nodes: Tensor,
    finish_reasons: Tensor,
    status: Tensor,
    slots: Tensor | None,
    logprobs: Tensor | None,
    top_ids: Tensor | None,
    top_logprobs: Tensor | None,
    num_logprobs: Tensor | None,
    path: Tensor | None,
    level_limits: Tensor | None,
    node_scores: Tensor | None,
    cuts: Tensor | None,
    max_nodes: Tensor | None,
) -> None: ...
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
def move_accept_tokens(
    stream: int | None,
    data_ptrs: Tensor,
    row_bytes: int,
    num_rows: int,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    accept_index: Tensor,
    num_correct_drafts: Tensor,
) -> None: ...
def all_reduce(
    stream: int | None, x: Tensor, buffers: Tensor, state: Tensor, rank: int, capacity: int, timeout: float, out: Tensor
) -> None: ...
def all_gather(
    stream: int | None, x: Tensor, buffers: Tensor, state: Tensor, rank: int, capacity: int, timeout: float, out: Tensor
) -> None: ...
def all_reduce_add_rms_norm(
    stream: int | None,
    x: Tensor,
    buffers: Tensor,
    state: Tensor,
    rank: int,
    capacity: int,
    timeout: float,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    out_sum: Tensor,
    out: Tensor,
) -> None: ...
def noop1(stream: int | None, a: Tensor) -> int: ...
def noop4(stream: int | None, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> int: ...
def noop8(
    stream: int | None, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor, h: Tensor
) -> int: ...
def attention_plan(
    *,
    batch: int,
    q_rows: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    packed: bool,
    fp8: bool,
    tensor_cores: bool,
    fixed_split: int,
    max_kv_len: int,
    num_sms: int,
    has_wgmma: bool,
    shared_bytes_per_block: int,
    shared_bytes_per_sm: int,
    plan: str | None,
) -> dict[str, Any]: ...
def current_gpu() -> dict[str, Any]: ...
def attention_variants() -> list[str]: ...
def mla_plan(
    *,
    batch: int,
    q_rows: int,
    q_heads: int,
    latent_dim: int,
    rope_dim: int,
    packed: bool,
    listed: bool,
    rows: str,
    tensor_cores: bool,
    fixed_split: int,
    max_kv_len: int,
    num_sms: int,
    has_wgmma: bool,
    shared_bytes_per_block: int,
    shared_bytes_per_sm: int,
    plan: str | None,
) -> dict[str, Any]: ...
def mla_variants() -> list[str]: ...

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
    def extend(self, tokens: Tensor, num_valid: Tensor, slots: Tensor | None, match_len: Tensor | None) -> None: ...
    def release(self, slot: int) -> None: ...
    def draft(
        self,
        slots: Tensor | None,
        seq_lens: Tensor,
        num_nodes: int,
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

class AdmittedRequest:
    """A request that gets a slot.

    Attributes:
        id: as `submit` returned it.
        tokens: its prompt and, after a retraction, the tokens that it has produced since.
        ngram_group: requests of a group draft n-grams from each other's texts; 0: all do.
        extra: as submitted.
        cached_entries: page-table entries of its first pages, whose rows are in the prefix cache.
        snapshot: of the recurrent states after those rows; -1: there are no such rows or states.
    """

    def __init__(
        self,
        *,
        id: int,
        tokens: list[int],
        ngram_group: int = 0,
        extra: Any = None,
        cached_entries: list[int] = [],
        snapshot: int = -1,
    ) -> None: ...
    @property
    def id(self) -> int: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def ngram_group(self) -> int: ...
    @property
    def extra(self) -> Any: ...
    @property
    def cached_entries(self) -> list[int]: ...
    @property
    def snapshot(self) -> int: ...

class PrefillChunk:
    """Rows of a prompt for one prefill pass.

    Attributes:
        slot: of the request.
        start: the first row.
        tokens: those of the rows, and the one after them; after a text's last token, the root, the root is repeated.
    """

    def __init__(self, *, slot: int, start: int, tokens: list[int]) -> None: ...
    @property
    def slot(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def tokens(self) -> list[int]: ...

class ConstrainedRow:
    """A request of a round whose next tokens a grammar constrains.

    Attributes:
        row: of the round.
        slot: of the request.
        tokens: its tokens since the last such call.
    """

    def __init__(self, *, row: int, slot: int, tokens: list[int]) -> None: ...
    @property
    def row(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def tokens(self) -> list[int]: ...

class _Executor(Protocol):
    """The device side, which the scheduler drives; see csrc/scheduler/executor.h, and scheduler.h for exceptions."""

    def begin(self, slot: int, request: AdmittedRequest) -> None: ...
    def prefill(self, chunks: list[PrefillChunk]) -> None: ...
    def save_snapshots(self, slots: list[int], snapshots: list[int]) -> None: ...
    def activate(self, slots: list[int]) -> None: ...
    def launch(self, batch: int, num_nodes: int, max_kv_len: int) -> None: ...
    def forward(self, batch: int, num_nodes: int, max_kv_len: int) -> None: ...
    def constrain(self, number: int, requests: list[ConstrainedRow], batch: int, num_nodes: int) -> None: ...
    def finish(self, batch: int, num_nodes: int, max_kv_len: int) -> None: ...
    def deactivate(self, slots: list[int]) -> None: ...
    def assign_pages(self, sources: list[int], destinations: list[int]) -> None: ...
    def progress(self) -> tuple[int, int]: ...

class RequestUpdate(NamedTuple):
    """New tokens of a request, or its end.

    Attributes:
        request_id: the request.
        tokens: its new tokens.
        reason: a `FinishReason`, 0 while it runs.
        rounds: rounds that emitted tokens so far.
        drafted: draft tokens verified so far.
        accepted: draft tokens accepted so far.
        cached: prompt tokens whose rows came from the prefix cache.
        status: `Status` of the slot if the reason is an error; 0 if an executor call raised.
        scores: log-probabilities of the tokens, ids of the best alternatives to each, and their log-probabilities; None
            if it asked for none.
        error: the exception of an executor call that ended it.
    """

    request_id: int
    tokens: list[int]
    reason: int
    rounds: int
    drafted: int
    accepted: int
    cached: int
    status: int
    scores: tuple[list[float], list[int], list[float]] | None
    error: BaseException | None

class SchedulerTimes(NamedTuple):
    """Counts of rounds and their rows, and totals in nanoseconds.

    Attributes:
        rounds: rounds whose results have been read.
        rows: requests of these rounds.
        host: work of the loop.
        wait: waiting of the loop for the device.
        prefill: calls of prefill.
        device: rounds on the device.
        following: of these, rounds that were launched while another was in flight, with nothing in between.
        gaps: idle time before those.
    """

    rounds: int
    rows: int
    host: int
    wait: int
    prefill: int
    device: int
    following: int
    gaps: int

class Submission:
    """The parameters of a request, described in csrc/scheduler/scheduler.h."""

    def __init__(
        self,
        *,
        prompt: Sequence[int] | Tensor,
        max_new_tokens: int,
        stop_tokens: Sequence[int] | Tensor = (),
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        streams: bool = True,
        min_new_tokens: int = 0,
        num_logprobs: int = -1,
        ngram_group: int = 0,
        max_nodes: int = 0,
        extra: object = None,
        constrained: bool = False,
        migrated: bool = False,
        cacheable: bool = True,
        shares_prefix: bool = True,
        priority: int = 0,
        timeout_ns: int = 0,
        client: int = 0,
    ) -> None: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def streams(self) -> bool: ...
    @property
    def min_new_tokens(self) -> int: ...
    @property
    def num_logprobs(self) -> int: ...
    @property
    def ngram_group(self) -> int: ...
    @property
    def max_nodes(self) -> int: ...
    @property
    def constrained(self) -> bool: ...
    @property
    def migrated(self) -> bool: ...
    @property
    def cacheable(self) -> bool: ...
    @property
    def shares_prefix(self) -> bool: ...
    @property
    def priority(self) -> int: ...
    @property
    def timeout_ns(self) -> int: ...
    @property
    def client(self) -> int: ...

class SchedulerConfig:
    """The sizes of a scheduler, described in csrc/scheduler/config.h."""

    def __init__(
        self,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        window: int = 0,
        vocab_size: int = 2147483647,
        max_len: int,
        reserve: int,
        accept_width: int,
        max_stops: int,
        max_logprobs: int = -1,
        prefill_chunk: int,
        prefill_requests: int,
        rounds_in_flight: int,
        draft_can_idle: bool = False,
        prefix_cache: bool = False,
        num_snapshots: int = 0,
        snapshot_pages: int = 1,
        lookahead: int = 1,
        batch_sizes: Sequence[int],
        rows: Sequence[Sequence[int]],
        drafted: Sequence[Sequence[int]] = (),
        plain_rounds: bool = False,
        max_idle_rounds: int = 0,
    ) -> None: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_len(self) -> int: ...
    @property
    def reserve(self) -> int: ...
    @property
    def accept_width(self) -> int: ...
    @property
    def max_stops(self) -> int: ...
    @property
    def max_logprobs(self) -> int: ...
    @property
    def prefill_chunk(self) -> int: ...
    @property
    def prefill_requests(self) -> int: ...
    @property
    def rounds_in_flight(self) -> int: ...
    @property
    def draft_can_idle(self) -> bool: ...
    @property
    def prefix_cache(self) -> bool: ...
    @property
    def num_snapshots(self) -> int: ...
    @property
    def snapshot_pages(self) -> int: ...
    @property
    def lookahead(self) -> int: ...
    @property
    def batch_sizes(self) -> list[int]: ...
    @property
    def rows(self) -> list[list[int]]: ...
    @property
    def drafted(self) -> list[list[int]]: ...
    @property
    def plain_rounds(self) -> bool: ...
    @property
    def max_idle_rounds(self) -> int: ...
    @property
    def num_levels(self) -> int: ...
    @property
    def max_batch(self) -> int: ...

# Values of a launch's number of nodes: replay the draft backlog, or run the first round of prefilled slots.
CATCH_UP: int
FIRST_ROUND: int

def command_words(max_batch: int, num_slots: int, max_stops: int) -> int: ...
def result_words(max_batch: int, accept_width: int, num_levels: int, max_logprobs: int) -> int: ...

class RoundCosts:
    """The cost of each budget level on the machine that runs the rounds.

    Attributes:
        batches: increasing batch sizes (a round with fewer requests runs at the next size).
        rows: rows[i], increasing: the budget levels of batches[i], in rows (tree nodes) of a round.
        us: us[i][j]: microseconds of a round of batches[i] with rows[i][j].
        catch_up: catch_up[i]: microseconds in which a draft of batches[i] replays its backlog; empty: it is never idle.
    """

    def __init__(
        self,
        batches: Sequence[int],
        rows: Sequence[Sequence[int]],
        us: Sequence[Sequence[float]],
        catch_up: Sequence[float] = [],
    ) -> None: ...
    @property
    def batches(self) -> list[int]: ...
    @property
    def rows(self) -> list[list[int]]: ...
    @property
    def us(self) -> list[list[float]]: ...
    @property
    def catch_up(self) -> list[float]: ...

class BudgetConstants:
    """The tuned constants of a budget; csrc/scheduler/budget_constants.h describes each and its source."""

    gain_window: float
    correction_window: float
    min_window_rounds: float
    optimism: float
    correction_prior: float
    max_correction: float
    explore_time_share: float
    explore_loss_share: float
    explore_rounds: int
    explore_max_cost: float
    retime_time_share: float
    retime_loss_share: float
    switch_margin: float

    def __init__(self) -> None: ...

class Budget:
    """Choose the rows of each round, as the scheduler does; see csrc/scheduler/budget.h."""

    def __init__(
        self,
        costs: RoundCosts,
        accept_width: int,
        max_idle_rounds: int = 0,
        constants: BudgetConstants = ...,
        drafted: Sequence[Sequence[int]] = ...,
    ) -> None: ...
    def next_level(self, size_index: int, num_requests: float, kv_rows: float, draft_lag: float = 0.0) -> int: ...
    def update_cost(self, size_index: int, level: int, num_requests: float, kv_rows: float, us: float) -> None: ...
    def update_gain(
        self, size_index: int, level: int, num_requests: float, predicted: Sequence[float], observed: Sequence[float]
    ) -> None: ...
    def expected_tokens(self, size_index: int, level: int, num_requests: float) -> float: ...

class PrefixCache:
    """The scheduler's radix tree of cached pages; see csrc/scheduler/prefix_cache.h.

    `find` and `insert` lock a prefix and return its node, for `unlock`, and its pages' entries in the page table.
    `clear` releases all locks.
    """

    def __init__(self, num_places: int, page_size: int, num_snapshots: int = 0, lookahead: int = 1) -> None: ...
    def find(self, text: Sequence[int], most_pages: int) -> tuple[int, list[int]]: ...
    def insert(self, text: Sequence[int], pages: int) -> tuple[int, list[int]]: ...
    def find_snapshot(self, text: Sequence[int], most_pages: int) -> tuple[int, int]: ...
    def take_snapshot(self) -> int: ...
    def keep_snapshot(self, text: Sequence[int], pages: int, snapshot: int) -> None: ...
    def unlock(self, node: int) -> None: ...
    def evict(self, count: int) -> list[int]: ...
    def clear(self) -> list[int]: ...
    @property
    def size(self) -> int: ...
    @property
    def num_locked(self) -> int: ...
    @property
    def num_snapshots(self) -> int: ...
    @property
    def num_evicted_snapshots(self) -> int: ...

class ReplaySizes:
    """The sizes of the memory that ranks share; `bytes` in all."""

    def __init__(self, *, num_ranks: int, capacity: int, depth: int, words: int) -> None: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def words(self) -> int: ...
    @property
    def bytes(self) -> int: ...

class PeerMemory:
    """Memory of a GPU that processes with other GPUs of the host map (CUDA IPC); `words` of 32 bits have one value.

    Raises:
        RuntimeError: CUDA cannot allocate it.
        NotImplementedError: this build has no CUDA half.
    """

    def __init__(self, device: int, words: int, value: int) -> None: ...
    @staticmethod
    def open(device: int, handle: bytes) -> PeerMemory:
        """Map the memory of another process for a device that reaches it by peer access."""
    def close(self) -> None:
        """Unmap or free the memory. All others unmap it before the process that allocated it frees it."""
    @property
    def handle(self) -> bytes:
        """Return what another process opens the memory by."""
    @property
    def address(self) -> int: ...

class ReplayChannel:
    """The memory that the ranks of a host share, as one of them sees it; see csrc/scheduler/replay.h.

    `memory` is int64 on the host, zeroed before the first rank takes it.
    """

    def __init__(self, memory: Tensor, sizes: ReplaySizes, rank: int) -> None: ...
    def write(self, record: bytes, name: str) -> None:
        """Write a record of a call on rank 0, which makes it next; wait while there is no room."""
    def enter(self, name: str) -> None:
        """Say, for errors, which call this rank makes next."""
    def made(self) -> None:
        """Say that this rank has made all calls that were recorded so far."""
    def close(self) -> None: ...
    def fail(self, reason: str) -> None:
        """End all ranks for this reason, unless there is one already."""
    def fail_unless_others(self, reason: str) -> None:
        """Do the same, after a moment in which another rank may be found to have ended."""
    def watch(self, most_delay: float = 30.0) -> None:
        """Watch the other ranks from now on. Call it when all ranks have their channels.

        `most_delay`: seconds that a rank may make a call, or finish a round, later than another one.
        """
    def watch_alarm(self, alarm: Tensor, what: str) -> None:
        """Let the watch fail with "rank N (process P) <what>" once `alarm` [1] int32 on the host is 1 + N."""
    def process(self, rank: int) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def failure(self) -> str:
        """Return why a rank has failed; empty if none has."""
    @property
    def closed(self) -> bool: ...

class Replayer:
    """Makes the executor calls that rank 0 records; arguments are as for `Scheduler`."""

    def __init__(
        self,
        executor: _Executor,
        channel: ReplayChannel,
        config: SchedulerConfig,
        *,
        commands: Tensor,
        results: Tensor,
        stream: int | None = None,
        graphs: Mapping[tuple[int, int, int], Sequence[int]] = {},
    ) -> None: ...
    def next(self) -> bytes | None:
        """Launch rounds until there is another record, and return it; None once rank 0 has closed the channel."""
    def set_graphs(self, graphs: Mapping[tuple[int, int, int], Sequence[int]]) -> None: ...

class Scheduler:
    """Continuous batching in C++.

    `commands` and `results` are the host's side of the rings that `apply_commands` and `publish_results` work on:
    contiguous int32, pinned if the device is a GPU. `graphs` are captured rounds, as raw cudaGraph_t, by batch, number
    of nodes and KV bucket; the smallest sufficient one is launched on `stream`. Three zeros: `apply_commands` and
    `free_pages` alone; no nodes: a draft replays its backlog. Other rounds are `executor.launch` calls. With a
    `channel`, launches are recorded for the other ranks, and rounds are compared with theirs.
    """

    def __init__(
        self,
        executor: _Executor,
        config: SchedulerConfig,
        *,
        commands: Tensor,
        results: Tensor,
        stream: int | None = None,
        graphs: Mapping[tuple[int, int, int], Sequence[int]] = {},
        trace: bool = False,
        channel: ReplayChannel | None = None,
    ) -> None: ...
    def submit(self, submission: Submission) -> int: ...
    def submit_many(self, submissions: Sequence[Submission]) -> list[int]:
        """Submit all, or none if one is refused."""
    def cancel(self, request_id: int) -> bool: ...
    def measure_rounds(self, batches: Sequence[int]) -> None: ...
    def set_costs(self, costs: RoundCosts) -> None: ...
    def run(self) -> None:
        """Run the loop until `stop`, and wait while there is no work. May be called again after an exception."""
    def step(self) -> bool:
        """Run one turn of the loop."""
    def settle(self) -> None:
        """Wait for rounds in flight that have no requests. Return at once while there are requests."""
    def clear_cache(self) -> None:
        """Empty the prefix cache before later requests begin. Must not be called from an executor call."""
    def stop(self) -> None:
        """Cancel all requests, admit no more, and let `run` return when they have ended."""
    def pause(self, restart: bool = False, request_id: int = -1) -> None:
        """Pause `run` between two turns with nothing in flight, until `resume`; return when it has paused.

        With a request, it does not pause before that one runs or has ended. With `restart`, requests that have slots
        return to the queue, and the prefix cache is emptied.
        """
    def resume(self) -> None: ...
    def held(self, request_id: int) -> tuple[int, list[int]] | None:
        """Return the slot of a running request and its text, whose last token is the root. Call it while paused."""
    def set_graphs(self, graphs: Mapping[tuple[int, int, int], Sequence[int]]) -> None:
        """Replace the captured rounds, and reset the counts of the rings. Call it while paused."""
    def take(self, wait: bool = True) -> list[RequestUpdate] | None:
        """Return the updates since the last call. With `wait`: at least one, or None once the loop has ended."""
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
    def num_cached_pages(self) -> int: ...
    @property
    def num_shared_pages(self) -> int:
        """Return the number of cached pages that requests use."""
    @property
    def num_prefix_hits(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_snapshots(self) -> int: ...
    @property
    def num_saved_snapshots(self) -> int: ...
    @property
    def num_evicted_snapshots(self) -> int: ...
    @property
    def num_restored_snapshots(self) -> int: ...
    @property
    def times(self) -> SchedulerTimes: ...
    @property
    def rounds_by_rows(self) -> list[list[int]]: ...
    @property
    def costs(self) -> RoundCosts | None: ...
