"""compat.sglang: check what the plugin relies on against the sources of SGLang.

The sources come from an installed engine, or from unpacked wheels: SPECDEC_ENGINE_SOURCES is a list of folders, separated by
colons, also of several versions. Only registries and base classes of an engine are run.
"""

from __future__ import annotations

import ast
import copy
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import sys
import types
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec_kernels
from specdec_kernels.compat import version_gate
from specdec_kernels.compat.sglang import functions as sglang
from specdec_kernels.compat.sglang import plugin as sglang_plugin
from specdec_kernels.compat.sglang import rounds as sglang_rounds
from specdec_kernels.compat.sglang.attention import TreeAttention, TreeAttentionSteps

ROOT = Path(__file__).resolve().parents[2]


def sources(package: str, known: str) -> Path:
    """Return the folder of a package's sources, in the version `known`."""
    folders = [folder for folder in os.environ.get("SPECDEC_ENGINE_SOURCES", "").split(os.pathsep) if folder]
    for path in [*folders, *sys.path]:
        spec = PathFinder.find_spec(package, [path])
        if spec is not None and spec.origin:
            folder = Path(spec.origin).parent
            if list(folder.parent.glob(f"{package}-{known}*.dist-info")):
                return folder
    pytest.skip(f"no sources of {package} {known} here")


def sglang_sources() -> Path:
    return sources("sglang", sglang_plugin.VERSIONS[0])


def module_of(folder: Path, name: str) -> ast.Module:
    """Parse the module of a dotted name, whose first part is the folder."""
    path = folder.joinpath(*name.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text())


def defined(module: ast.Module) -> set[str]:
    """Return the names that a module binds at its top, also in conditions."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def class_of(module: ast.Module, name: str) -> dict[str, ast.FunctionDef]:
    """Return the methods of a class."""
    found = next(node for node in ast.walk(module) if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


def parameters(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]]


def test_sglang_plugin_imports_exist() -> None:
    folder = sglang_sources()
    asked = [
        (node.module, alias.name)
        for ours in (sglang_plugin, sglang_rounds)
        for node in ast.walk(ast.parse(Path(str(ours.__file__)).read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("sglang.")
        for alias in node.names
    ]
    assert len(asked) >= 12
    for module, name in asked:
        assert name in defined(module_of(folder, module)), f"{module}.{name}"


def test_sglang_attention_implements_backend_interface() -> None:
    folder = sglang_sources()
    methods = class_of(module_of(folder, "sglang.srt.layers.attention.base_attn_backend"), "AttentionBackend")
    ours = {name: value for name, value in vars(TreeAttention).items() if inspect.isfunction(value)}
    for name in (
        "init_forward_metadata",
        "init_forward_metadata_out_graph",
        "init_forward_metadata_in_graph",
        "init_cuda_graph_state",
        "get_cuda_graph_seq_len_fill_value",
        "update_verify_buffers_to_fill_after_draft",
        "forward_extend",
        "forward_decode",
    ):
        have = list(inspect.signature(ours[name]).parameters)
        want = parameters(methods[name])
        assert have[: len(want)] == want, name
    # Abstract methods that ours lacks belong to passes that the plugin does not serve.
    abstract = {
        name for name, node in methods.items() if any(isinstance(n, ast.Raise) for n in node.body) and name not in ours
    }
    assert abstract == {
        "forward_mixed",  # other devices
        "init_forward_metadata_for_breakable_cuda_graph_capture",  # for those that opt in
        "prepare_forward_metadata_for_breakable_cuda_graph_replay",
    }
    steps = class_of(module_of(folder, "sglang.srt.layers.attention.triton_backend"), "TritonMultiStepDraftBackend")
    for name in set(steps) - {"__init__", "common_template"}:
        assert list(inspect.signature(getattr(TreeAttentionSteps, name)).parameters) == parameters(steps[name])[:3], (
            name
        )


def test_sglang_attention_reads_existing_fields() -> None:
    folder = sglang_sources()
    modes = class_of(module_of(folder, "sglang.srt.model_executor.forward_batch_info"), "ForwardMode")
    assert {"is_decode_or_idle", "is_target_verify", "is_draft_extend_v2"} <= set(modes)
    layer = ast.unparse(class_of(module_of(folder, "sglang.srt.layers.radix_attention"), "RadixAttention")["__init__"])
    for name in (
        "layer_id", "tp_q_head_num", "qk_head_dim", "scaling", "sliding_window_size", "logit_cap", "is_cross_attention",
        "logit_capping_method", "k_scale", "v_scale", "k_scale_float", "v_scale_float", "attn_type", "xai_temperature_len",
    ):  # fmt: skip
        assert f"self.{name} = " in layer, name
    pools = module_of(folder, "sglang.srt.mem_cache.memory_pool")
    pool = class_of(pools, "MHATokenToKVPool")
    assert parameters(pool["set_kv_buffer"])[1:7] == ["layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale"]
    assert "return (loc_info, None, None)" in ast.unparse(pools)  # a bare tensor of locations is valid
    assert "range(1, self._alloc_size)" in ast.unparse(pools)  # row 0 of req_to_token is unused
    inputs = ast.unparse(module_of(folder, "sglang.srt.speculative.eagle_info"))
    assert "def tree_topk(self) -> int:" in inputs and "draft_token_num: int" in inputs
    extend = ast.unparse(module_of(folder, "sglang.srt.speculative.eagle_worker_common"))
    assert "forward_batch.seq_lens = forward_batch.seq_lens + num_draft_tokens" in extend
    assert "tree_mask_buf = verify_mask.buffer if verify_mask.fits(bs) else None" in extend
    places = ast.unparse(module_of(folder, "sglang.kernels.ops.speculative.cache_locs"))
    assert "token_pool_ptr + seq_len + topk_id * num_steps + tl.arange(0, iter_upper)" in places


def test_sglang_draft_attention_factory_matches() -> None:
    folder = sglang_sources()
    methods = class_of(module_of(folder, "sglang.srt.speculative.draft_utils"), "DraftBackendFactory")
    assert parameters(methods["create_decode_backend"]) == ["self"]
    assert parameters(methods["create_draft_extend_backend"]) == ["self"]
    made = ast.unparse(methods["__init__"])
    for name in ("server_args", "draft_model_runner", "topk", "speculative_num_steps"):
        assert f"self.{name} = " in made
    assert "self.draft_attn_backend = server_args.speculative_draft_attention_backend" in made
    worker = module_of(folder, "sglang.srt.speculative.eagle_worker_v2")
    assert "graph_supported_backend_types = [TritonAttnBackend" in ast.unparse(worker)
    mask = next(
        node
        for node in ast.walk(module_of(folder, "sglang.srt.layers.attention.verify_mask"))
        if isinstance(node, ast.ClassDef) and node.name == "VerifyMask"
    )
    fields = [
        node.target.id for node in mask.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    assert fields[:3] == ["buffer", "mode", "max_bs"]


def calls_of(module: ast.Module, name: str) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


def test_sglang_functions_accept_sglang_call_arguments() -> None:
    module = module_of(sglang_sources(), "sglang.srt.speculative.eagle_utils")
    for name, ours in {
        "sgl_build_tree_kernel_efficient": sglang.build_tree_kernel_efficient,
        "verify_tree_greedy": sglang.verify_tree_greedy,
        "sampling_fn": sglang.tree_speculative_sampling_target_only,
    }.items():
        calls = calls_of(module, name)
        assert calls, name
        for call in calls:
            inspect.signature(ours).bind(*call.args, **{str(word.arg): None for word in call.keywords})


def test_sglang_draft_probabilities_go_to_fast_topk_only() -> None:
    """Between the two wrapped functions, SGLang reads no probability unless it samples drafts."""
    folder = sglang_sources()
    utils = module_of(folder, "sglang.srt.speculative.spec_utils")
    renorm = next(n for n in ast.walk(utils) if isinstance(n, ast.FunctionDef) and n.name == "renorm_draft_probs")
    assert [argument.arg for argument in renorm.args.args] == [
        "next_token_logits", "sampling_info", "use_rejection_sampling"
    ]  # fmt: skip
    for call in calls_of(module_of(folder, "sglang.srt.speculative.eagle_worker_v2"), "renorm_draft_probs"):
        assert len(call.args) == 3 and not call.keywords  # positional, as ours expects
    topk = module_of(folder, "sglang.srt.utils.common")
    fast_topk = next(n for n in ast.walk(topk) if isinstance(n, ast.FunctionDef) and n.name == "fast_topk")
    assert [argument.arg for argument in fast_topk.args.args] == ["values", "topk", "dim"]
    callers = {
        path.stem
        for path in (folder / "srt").rglob("*.py")
        if "renorm_draft_probs(" in path.read_text() and path.stem != "spec_utils"
    }
    assert callers <= {"eagle_worker_v2", "eagle_draft_cuda_graph_runner"}  # the second only mentions it
    worker = module_of(folder, "sglang.srt.speculative.eagle_worker_v2")
    imported = [
        node.module
        for node in ast.walk(worker)
        if isinstance(node, ast.ImportFrom) and any(alias.name == "fast_topk" for alias in node.names)
    ]
    assert imported == ["sglang.srt.utils.common"]
    asked = ast.unparse(worker).count("fast_topk(probs, self.topk, dim=-1)")
    assert asked == len(calls_of(worker, "renorm_draft_probs")) == 3


def test_sglang_round_functions_match_wrappers() -> None:
    """SGLang's functions have the arguments that ours pass on, and read the fields that ours change."""
    folder = sglang_sources()

    def function(module: str, name: str) -> ast.FunctionDef:
        tree = module_of(folder, f"sglang.srt.{module}")
        return next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)

    for ours, module, name in (
        (sglang_rounds.verify_logits, "layers.logits_processor", "_get_logits"),
        (sglang_rounds.sample, "speculative.eagle_utils", "eagle_sample"),
        (sglang_rounds.extend_accepted, "speculative.eagle_worker_v2", "_draft_extend_for_decode"),
        (sglang_rounds.move_accepted, "speculative.spec_utils", "move_accept_tokens_to_target_kvcache"),
    ):
        assert len(inspect.signature(ours).parameters) == 1 + len(parameters(function(module, name))), name
    widths = parameters(function("speculative.spec_utils", "resolve_num_tokens_per_req"))
    assert {"phase", "server_args"} <= set(widths)
    extend = ast.unparse(function("speculative.eagle_worker_v2", "_draft_extend_for_decode"))
    assert extend.count("speculative_num_draft_tokens") == 5  # each the width of draft-extend
    for read in ("batch_result.logits_output.hidden_states", "batch_result.next_token_ids", "len(batch.seq_lens)"):
        assert read in extend
    graphs = ast.unparse(module_of(folder, "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner"))
    assert "captured_req_width = resolve_num_tokens_per_req(" in graphs
    sampling = ast.unparse(function("speculative.eagle_utils", "eagle_sample"))
    for name in ("is_all_greedy", "acc_additive_penalties", "acc_scaling_penalties", "logit_bias", "grammar_mask"):
        assert name in sampling
    # Only the wrapped function and those for log-probabilities read the logits of trees.
    for module, name in (
        ("speculative.eagle_worker_common", "run_eagle_verify"),
        ("speculative.ngram_worker", "forward_batch_generation"),
    ):
        verify = ast.unparse(function(module, name))
        reads = [line for line in verify.splitlines() if "next_token_logits" in line]
        assert len(reads) == 2 and all("maybe_detect" in line for line in reads)
        assert "eagle_sample(verify_input, batch, logits_output, grammar_mask)" in verify
    logits = ast.unparse(function("layers.logits_processor", "_get_logits"))
    for name in ("do_tensor_parallel_all_gather", "logit_scale", "final_logit_softcapping"):
        assert f"self.{name}" in logits
    head = ast.unparse(function("layers.logits_processor", "_compute_lm_head"))
    for name in ("use_fp32_lm_head", "rl_on_policy_target"):
        assert f"self.{name}" in head
    move = ast.unparse(function("speculative.spec_utils", "move_accept_tokens_to_target_kvcache"))
    assert "batch.seq_lens + num_correct_drafts + 1" in move and "allocator.get_kvcache().move_kv_cache" in move
    pool = ast.unparse(module_of(folder, "sglang.srt.mem_cache.memory_pool"))
    for name in ("data_ptrs", "use_hnd", "use_native_move_kv_cache", "k_buffer", "v_buffer"):
        assert f"self.{name} = " in pool, name


def test_sglang_best_of_matches_topk_of_softmax() -> None:
    logits = torch.randn(3, 50)

    def renorm(given: torch.Tensor, sampling_info: Any, use_rejection_sampling: bool) -> torch.Tensor:
        return given.softmax(-1)

    def topk(values: torch.Tensor, count: int, dim: int) -> Any:
        return torch.topk(values, count, dim)

    # On the CPU, and if drafts are sampled, SGLang's functions run.
    assert torch.equal(sglang_rounds.keep_logits(renorm, logits, None, False), logits.softmax(-1))
    assert torch.equal(sglang_rounds.keep_logits(renorm, logits, None, True), logits.softmax(-1))
    want = torch.topk(logits.softmax(-1), 4, -1)
    for values in (logits.softmax(-1), sglang_rounds.DraftLogits(logits)):
        probabilities, tokens = sglang_rounds.best_of(topk, values, 4, dim=-1)
        torch.testing.assert_close(probabilities, want.values)
        assert torch.equal(tokens, want.indices) and tokens.dtype == torch.int64
    many = torch.randn(2, 100)
    probabilities, tokens = sglang_rounds.best_of(topk, sglang_rounds.DraftLogits(many), 80, dim=-1)
    assert torch.equal(tokens, torch.topk(many.softmax(-1), 80, -1).indices)


def test_sglang_ngram_worker_matches() -> None:
    folder = sglang_sources()
    module = module_of(folder, "sglang.srt.speculative.ngram_worker")
    methods = class_of(module, "NGRAMWorker")
    assert parameters(methods["_prepare_draft_tokens"]) == ["self", "batch"]
    assert parameters(methods["_update_ngram_corpus"]) == ["self", "batch"]
    assert {"alloc_memory_pool", "clear_cache_pool"} <= set(methods)
    text = ast.unparse(module)
    for name in ("draft_token_num", "max_batch_size", "enable_overlap", "model_runner"):
        assert f"self.{name}" in text
    assert "accept_tokens[:, 0] = predict" in text  # num_nodes entries for each request
    algorithms = class_of(module_of(folder, "sglang.srt.speculative.spec_registry"), "CustomSpecAlgo")
    assert {"is_ngram", "has_draft_kv", "handle_server_args", "create_worker"} <= set(algorithms)


def test_sglang_entry_point_group_matches() -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    group = project["entry-points"]["sglang.srt.plugins"]
    module, _, name = group["specdec"].partition(":")
    assert getattr(importlib.import_module(module), name) is sglang_plugin.register
    plugins = module_of(sglang_sources(), "sglang.srt.plugins")
    assert 'GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"' in ast.unparse(plugins).replace("'", '"')


class Registries(types.ModuleType):
    """A stub for every module of SGLang that the plugin imports."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.choices: list[str] = []
        self.backends: dict[str, Any] = {}
        self.algorithms: dict[str, Any] = {}

    def add_attention_backend_choices(self, names: list[str]) -> None:
        self.choices += names

    def register_attention_backend(self, name: str) -> Any:
        return lambda make: self.backends.setdefault(name, make)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Registries:
    """Install a stub of SGLang's registries, in the known version."""
    module = Registries("sglang")
    names = [
        "sglang", "sglang.srt", "sglang.srt.server_args", "sglang.srt.layers", "sglang.srt.layers.attention",
        "sglang.srt.layers.attention.attention_registry", "sglang.srt.plugins", "sglang.srt.plugins.hook_registry",
        "sglang.srt.speculative", "sglang.srt.speculative.spec_info", "sglang.srt.speculative.spec_registry",
    ]  # fmt: skip
    for name in names:
        monkeypatch.setitem(sys.modules, name, module)
    hooks: list[tuple[str, Any, str]] = []
    module.HookType = types.SimpleNamespace(AROUND="around", REPLACE="replace")  # type: ignore[attr-defined]
    module.HookRegistry = types.SimpleNamespace(register=lambda *hook: hooks.append(hook))  # type: ignore[attr-defined]
    module.hooks = hooks  # type: ignore[attr-defined]

    class Algorithms:
        NGRAM = types.SimpleNamespace(
            handle_server_args=lambda args: setattr(args, "seen", True), need_topk=lambda: False
        )

        @staticmethod
        def register(name: str, *, supports_overlap: bool, spec_class: type) -> Any:
            assert supports_overlap
            return lambda factory: module.algorithms.setdefault(name, (spec_class, factory))

    module.SpeculativeAlgorithm = Algorithms  # type: ignore[attr-defined]
    module.CustomSpecAlgo = type("CustomSpecAlgo", (), {"is_eagle": lambda self: False})  # type: ignore[attr-defined]
    monkeypatch.setattr(version_gate, "version", lambda package: sglang_plugin.VERSIONS[0])
    return module


def test_sglang_plugin_registers_all_parts(host: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        sglang_plugin.register()
    assert host.choices == ["specdec"] and set(host.backends) == {"specdec"}
    hooked = {target for target, _, _ in host.hooks}
    factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
    assert {f"{factory}.create_decode_backend", f"{factory}.create_draft_extend_backend"} <= hooked
    spec_class, _ = host.algorithms["SPECDEC_NGRAM"]
    algorithm, args = spec_class(), types.SimpleNamespace()
    assert algorithm.is_ngram() and not algorithm.is_eagle() and not algorithm.has_draft_kv()
    assert algorithm.need_topk() is False  # as SGLang's own
    assert type(copy.deepcopy(algorithm)) is spec_class
    algorithm.handle_server_args(args)
    assert args.seen
    assert "specdec: SGLang 0.5.17 has the attention backend specdec; " in caplog.text


def test_sglang_hook_targets_exist(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specdec_kernels, "cuda_version", "13.0")
    sglang_plugin.register()
    hooked = [target for target, _, _ in host.hooks]
    assert len(hooked) == len(set(hooked)) >= 12
    folder = sglang_sources()
    for target in hooked:
        package, *path, last = target.split(".")
        if package == "sgl_kernel":
            assert path == [] and last in vars(sglang)
            continue
        is_method = path[-1][0].isupper()
        module = module_of(folder, ".".join([package, *(path[:-1] if is_method else path)]))
        assert last in (class_of(module, path[-1]) if is_method else defined(module)), target


def test_sglang_drafts_of_other_backends_are_untouched(host: Any) -> None:
    args = types.SimpleNamespace(
        speculative_draft_attention_backend=None, decode_attention_backend=None, prefill_attention_backend=None,
        attention_backend="fa3",
    )  # fmt: skip
    factory = types.SimpleNamespace(server_args=args, speculative_num_steps=1)
    assert sglang_plugin.draft_decode(lambda self: "its own", factory) == "its own"
    args.speculative_draft_attention_backend = "specdec"
    assert sglang_plugin.draft_decode(lambda self: "its own", factory) is None  # one step has no attention


@pytest.mark.parametrize("found", ["0.5.23", None])
def test_sglang_unknown_version_warns_once_and_changes_nothing(
    host: Any, found: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def version(package: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(version_gate, "version", version)
    sglang_plugin.register()
    assert not host.choices and not host.backends and not host.hooks and not host.algorithms
    assert [record.getMessage() for record in caplog.records] == [
        f"specdec: SGLang {found or 'of no known version'} is not known, expected 0.5.17; nothing is changed"
    ]


def test_sglang_plugin_is_disabled_by_variable(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_SGLANG", "0")
    sglang_plugin.register()
    assert not host.choices and not host.hooks


def test_sglang_hook_registry_replaces_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the hook registry alone: a function is replaced in its module and in modules that imported it."""
    path = sglang_sources() / "srt" / "plugins" / "hook_registry.py"
    spec = importlib.util.spec_from_file_location("hook_registry_of_sglang", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernels, user = types.ModuleType("sgl_kernel"), types.ModuleType("user_of_sgl_kernel")

    def verify_tree_greedy() -> str:
        return "its own"

    verify_tree_greedy.__module__ = "sgl_kernel"
    kernels.verify_tree_greedy = user.verify = verify_tree_greedy  # type: ignore[attr-defined]
    for each in (kernels, user):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    module.HookRegistry.register("sgl_kernel.verify_tree_greedy", lambda: "ours", module.HookType.REPLACE)
    module.HookRegistry.apply_hooks()
    assert kernels.verify_tree_greedy() == "ours"
