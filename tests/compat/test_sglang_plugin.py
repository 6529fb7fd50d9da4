"""compat.sglang.plugin: what it registers in each version of SGLang, on stubs and on recorded contracts.

`test_hook_registry_replaces_functions` runs a module of SGLang, from an installed one or from unpacked wheels:
SPECDEC_ENGINE_SOURCES is a list of folders, separated by colons, also of several versions.
"""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec_kernels
from specdec_kernels.compat import version_gate
from specdec_kernels.compat.contracts import Names, Parameters, Sources
from specdec_kernels.compat.sglang import choice as sglang_choice
from specdec_kernels.compat.sglang import functions as sglang
from specdec_kernels.compat.sglang import plugin as sglang_plugin
from specdec_kernels.compat.sglang import rounds as sglang_rounds
from specdec_kernels.compat.sglang.attention import TreeAttention, TreeAttentionSteps
from specdec_kernels.compat.sglang.contracts import VERSIONS, host_of, parts_of
from specdec_kernels.compat.version_gate import Takeover, take_over
from support.engine_sources import sources_of

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "tests" / "compat" / "contracts"
each_version = pytest.mark.parametrize("version", VERSIONS)


def contracts_of(version: str) -> list[Any]:
    return [contract for part in parts_of(version) for contract in part.contracts]


def parameters_in(version: str, place: str) -> tuple[str, ...]:
    (names,) = {one.names for one in contracts_of(version) if isinstance(one, Parameters) and one.place.endswith(place)}
    return names


@each_version
def test_imports_are_contracts(version: str) -> None:
    """Each name that the plugin imports from SGLang, if the version has it, is in a contract."""
    held = {f"{one.place}.{name}" for one in contracts_of(version) if isinstance(one, Names) for name in one.names}
    held |= {
        part for one in contracts_of(version) for part in (one.place.partition(":")[0], one.place.replace(":", "."))
    }
    imported = {
        f"{node.module}.{alias.name}"
        for ours in (sglang_choice, sglang_plugin, sglang_rounds)
        for node in ast.walk(ast.parse(Path(str(ours.__file__)).read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("sglang.")
        for alias in node.names
    }
    assert len(imported) >= 18
    of_some = set() if host_of(version).mlp_sync_takes_args else {"sglang.srt.runtime_context.get_server_args"}
    if not host_of(version).declares_arguments:
        of_some |= {one for one in imported if ".model_override_base." in one or one.endswith(".declare_resolution")}
    assert imported - held == of_some


@each_version
def test_methods_have_the_parameters_of_the_base(version: str) -> None:
    """The backend's methods, and those of the multi-step backend, which are called alike."""
    for method in (
        "init_forward_metadata",
        "init_forward_metadata_out_graph",
        "init_forward_metadata_in_graph",
        "init_cuda_graph_state",
        "get_cuda_graph_seq_len_fill_value",
        "update_verify_buffers_to_fill_after_draft",
        "forward_extend",
        "forward_decode",
    ):
        want = parameters_in(version, f"AttentionBackend.{method}")
        for ours in (TreeAttention, TreeAttentionSteps):
            if hasattr(ours, method):
                assert tuple(inspect.signature(getattr(ours, method)).parameters)[: len(want)] == want, method


@each_version
def test_wrappers_have_the_parameters_of_what_they_wrap(version: str) -> None:
    wrapped = {
        "spec_utils:renorm_draft_probs": sglang_rounds.keep_logits,
        "common:fast_topk": sglang_rounds.best_of,
        "LogitsProcessor._get_logits": sglang_rounds.verify_logits,
        "eagle_utils:eagle_sample": sglang_rounds.sample,
        "spec_utils:move_accept_tokens_to_target_kvcache": sglang_rounds.move_accepted,
        "EagleDraftWorker._draft_extend_for_decode": sglang_rounds.extend_accepted,
    }
    settings = {
        "verify_logits": {"head_settings": ()},
        "move_accepted": {"within_window": False},
        "extend_accepted": {"mlp_sync_takes_args": False},
    }
    for place, ours in wrapped.items():
        names = parameters_in(version, place)
        keywords = {name: None for name in names if name in ("kv_loc_plan", "watermark_state", "watermark_full_mask")}
        positional = [None] * (len(names) - len(keywords))
        inspect.signature(ours).bind(None, *positional, **keywords, **settings.get(ours.__name__, {}))
    inspect.signature(sglang_rounds.accepted_width).bind(
        None, **dict.fromkeys(parameters_in(version, ":resolve_num_tokens_per_req")), mlp_sync_takes_args=False
    )


@pytest.mark.parametrize("version", [known for known in VERSIONS if host_of(known).tree_kernels != "sgl_kernel"])
@pytest.mark.parametrize(
    "name", ["build_tree_kernel_efficient", "verify_tree_greedy", "tree_speculative_sampling_target_only"]
)
def test_functions_have_the_parameters_of_what_they_replace(version: str, name: str) -> None:
    assert tuple(inspect.signature(getattr(sglang, name)).parameters) == parameters_in(version, f":{name}")


def test_best_of_matches_topk_of_softmax() -> None:
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
    monkeypatch.setattr(version_gate, "version", lambda package: VERSIONS[0])
    monkeypatch.setattr(specdec_kernels, "cuda_version", "13.0")
    monkeypatch.setattr(TreeAttention, "serves_hybrids", False)
    return module


register_backend = Registries.register_attention_backend


FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"


@each_version
def test_plugin_registers_all_parts(
    host: Any, version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(version_gate, "version", lambda package: f"{version}+cu130")
    with caplog.at_level(logging.INFO):
        sglang_plugin.register()
    assert host.choices == ["specdec"] and set(host.backends) == {"specdec"} and TreeAttention.serves_hybrids
    hooked = [target for target, _, _ in host.hooks]
    assert len(hooked) == len(set(hooked)) == 13 and host_of(version).model_step in hooked
    assert {f"{FACTORY}.create_decode_backend", f"{FACTORY}.create_draft_extend_backend"} <= set(hooked)
    kernels = {target for target in hooked if not target.startswith("sglang.srt.")}
    tree, sampling = host_of(version).tree_kernels, host_of(version).sampling_kernel
    assert kernels == {
        f"{tree}.build_tree_kernel_efficient",
        f"{tree}.verify_tree_greedy",
        f"{sampling}.tree_speculative_sampling_target_only",
    }
    spec_class, _ = host.algorithms["SPECDEC_NGRAM"]
    algorithm, args = spec_class(), types.SimpleNamespace()
    assert algorithm.is_ngram() and not algorithm.is_eagle() and not algorithm.has_draft_kv()
    assert algorithm.need_topk() is False  # as SGLang's own
    assert type(copy.deepcopy(algorithm)) is spec_class
    algorithm.handle_server_args(args)
    assert args.seen
    assert caplog.messages == [
        f"specdec: SGLang {version}+cu130 has {', '.join(part.name for part in parts_of(version))}"
    ]


def test_hooked_functions_are_contracts(host: Any) -> None:
    """Each function of SGLang that is hooked is the place of a contract."""
    sglang_plugin.register()
    places = {one.place.replace(":", ".") for one in contracts_of(VERSIONS[0])}
    for target, _, _ in host.hooks:
        assert target.startswith("sgl_kernel.") or target in places, target


def test_plugin_without_kernels_leaves_functions(
    host: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(specdec_kernels, "cuda_version", None)
    with caplog.at_level(logging.INFO):
        sglang_plugin.register()
    assert {target for target, _, _ in host.hooks} == {
        host_of(VERSIONS[0]).model_step, f"{FACTORY}.create_decode_backend", f"{FACTORY}.create_draft_extend_backend"
    }  # fmt: skip
    assert caplog.messages == [
        "specdec: SGLang 0.5.17 has attention, attention choice, hybrid models, draft attention, SPECDEC_NGRAM; its functions stay its own, since this "
        "build has no CUDA kernels"
    ]


def newer(monkeypatch: pytest.MonkeyPatch, version: str, changes: dict[str, Any]) -> None:
    """Let SGLang have a version whose sources are the newest tested ones, but for `changes`."""
    record = json.loads((RECORDS / f"sglang-{VERSIONS[-1]}.json").read_text())
    assert set(changes) <= set(record)
    monkeypatch.setattr(version_gate, "version", lambda package: version)
    monkeypatch.setattr(Sources, "of_installed", lambda package: record | changes)


def test_changed_signature_leaves_out_its_part(
    host: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = "sglang.srt.speculative.eagle_utils:eagle_sample"
    want = parameters_in(VERSIONS[-1], place)
    newer(monkeypatch, "0.5.24", {f"Parameters {place}": ["verify_inputs", *want[1:]]})
    sglang_plugin.register()
    hooked = {target.rpartition(".")[2] for target, _, _ in host.hooks}
    assert not {"eagle_sample", "_get_logits"} & hooked and {"fast_topk", "create_decode_backend"} <= hooked
    assert set(host.backends) == {"specdec"} and set(host.algorithms) == {"SPECDEC_NGRAM"}
    kept = [part.name for part in parts_of(VERSIONS[-1]) if part.name != "verification logits"]
    assert caplog.messages == [
        f"specdec: SGLang 0.5.24 is not tested (0.5.17 to 0.5.23 are); by its sources it gets {', '.join(kept)}; without "
        f"verification logits ({place} has the parameters ({', '.join(['verify_inputs', *want[1:]])}), expected "
        f"({', '.join(want)}))"
    ]


def test_changed_backend_leaves_out_the_parts_that_need_it(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = "Exactly sglang.srt.model_executor.forward_batch_info:ForwardMode fields"
    newer(monkeypatch, "0.6.0", {modes: ["EXTEND", "DECODE", "TREE"]})
    sglang_plugin.register()
    hooked = {target.rpartition(".")[2] for target, _, _ in host.hooks}
    assert not host.backends and not {"create_decode_backend", "resolve_num_tokens_per_req"} & hooked
    assert {"eagle_sample", "fast_topk", "verify_tree_greedy"} <= hooked


def test_changed_wrapper_of_hybrid_models_leaves_them_refused(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "sglang.srt.layers.attention.hybrid_linear_attn_backend:HybridLinearAttnBackend.__init__"
    newer(monkeypatch, "0.5.24", {f"Same {place}": 1})
    sglang_plugin.register()
    assert set(host.backends) == {"specdec"} and not TreeAttention.serves_hybrids


def test_part_that_raises_in_an_untested_version_is_left_out(
    host: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    newer(monkeypatch, "0.5.24", {})
    del Registries.register_attention_backend
    try:
        sglang_plugin.register()
    finally:
        Registries.register_attention_backend = register_backend  # type: ignore[method-assign]
    hooked = {target.rpartition(".")[2] for target, _, _ in host.hooks}
    assert not {"create_decode_backend", "resolve_num_tokens_per_req"} & hooked and "fast_topk" in hooked
    assert len(caplog.messages) == 2 and caplog.messages[1].startswith(
        "specdec: SGLang 0.5.24 stays without attention: ImportError("
    )


def test_part_that_raises_in_a_tested_version_is_an_error() -> None:
    def register(name: str) -> None:
        raise RuntimeError(name)

    found = Takeover(VERSIONS[0], VERSIONS[0], ("attention",))
    with pytest.raises(RuntimeError, match=r"^attention$"):
        take_over(found, parts_of(VERSIONS[0]), register, "SGLang", logging.getLogger("test"))


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ("0.5.16", "SGLang 0.5.16 is older than 0.5.17, the first tested version"),
        (None, "the version of SGLang is not known"),
    ],
)
def test_older_version_warns_once_and_changes_nothing(
    host: Any, found: str | None, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def version(package: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(version_gate, "version", version)
    sglang_plugin.register()
    assert not host.choices and not host.backends and not host.hooks and not host.algorithms
    assert caplog.messages == [f"specdec: {reason}; nothing is changed"]


def test_plugin_is_disabled_by_variable(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_SGLANG", "0")
    sglang_plugin.register()
    assert not host.choices and not host.hooks


def test_entry_point_is_register() -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["sglang.srt.plugins"]["specdec"].partition(":")
    assert getattr(importlib.import_module(module), name) is sglang_plugin.register


class Factory:
    """A stub of `DraftBackendFactory`."""

    def __init__(self, **changes: Any) -> None:
        self.draft_attn_backend: str | None = None
        self.speculative_num_steps = 1
        self.draft_model_runner = object()
        vars(self).update(changes)


@pytest.fixture
def drafts(host: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a stub of SGLang's configuration and base classes, and let our attention need no engine."""
    kernel = types.SimpleNamespace(
        prefill_attention_backend=None, decode_attention_backend=None, attention_backend="fa3"
    )
    spec = types.SimpleNamespace(speculative_draft_attention_backend=None, speculative_attention_mode="prefill")
    host.get_exec, host.get_spec = lambda: types.SimpleNamespace(kernel=kernel), lambda: spec

    class AttentionBackend:
        needs_cpu_seq_lens = True
        verify_mask = None

        def glue_draft_metadata(self) -> str:
            return "off"

        def forward_extend(self) -> None: ...

    class TritonAttnBackend(AttentionBackend):
        verify_mask = "of triton"

        def glue_draft_metadata(self) -> str:
            return ""

    host.AttentionBackend, host.TritonAttnBackend, host.kernel, host.attention_registry = (
        *(AttentionBackend, TritonAttnBackend, kernel), host
    )  # fmt: skip
    for name in (
        ".srt.runtime_context",
        ".srt.layers.attention.base_attn_backend",
        ".srt.layers.attention.triton_backend",
    ):
        monkeypatch.setitem(sys.modules, f"sglang{name}", host)
    monkeypatch.setattr(TreeAttention, "__init__", lambda self, runner: None)
    monkeypatch.setattr(TreeAttentionSteps, "__init__", fake_steps)
    return host


def fake_steps(self: Any, runner: Any, topk: int, num_steps: int, step_class: Any) -> None:
    self.attn_backends = [step_class(runner) for _ in range(num_steps - 1)]


def test_drafts_of_other_backends_are_untouched(drafts: Any) -> None:
    for make in (sglang_plugin.draft_decode, sglang_plugin.draft_extend):
        assert make(lambda self: "its own", Factory()) == "its own"
        assert make(lambda self: "its own", Factory(draft_attn_backend="specdec", qsa_profile=object())) == "its own"
    ours = Factory(draft_attn_backend="specdec")
    assert sglang_plugin.draft_decode(lambda self: "its own", ours) is None  # one step has no attention


def test_drafts_get_our_backends_with_their_names(drafts: Any) -> None:
    drafts.kernel.attention_backend = "specdec"
    factory = Factory(speculative_num_steps=4, topk=2, qsa_profile=None)
    steps = sglang_plugin.draft_decode(lambda self: "its own", factory)
    assert len(steps.attn_backends) == 3 and steps.kv_index_translator is None
    extend = sglang_plugin.draft_extend(lambda self: "its own", factory)
    for backend in (steps, *steps.attn_backends, extend):
        assert backend.prefill_attention_backend_str == backend.decode_attention_backend_str == "specdec"
    # By name one of triton's; what it does is ours, or that of the base of all.
    assert isinstance(extend, drafts.TritonAttnBackend) and isinstance(extend, TreeAttention)
    assert extend.glue_draft_metadata() == "off" and extend.verify_mask is None and not extend.needs_cpu_seq_lens
    assert type(extend).forward_extend is TreeAttention.forward_extend


def test_drafts_that_sglang_wraps_are_refused(drafts: Any) -> None:
    factory = Factory(draft_attn_backend="specdec", speculative_num_steps=3, topk=1)
    drafts.attn_backend_wrapper_for_draft_decode = drafts.attn_backend_wrapper_for_draft_extend = lambda runner, one: (
        one
    )
    assert sglang_plugin.draft_decode(lambda self: None, factory).attn_backends
    assert sglang_plugin.draft_extend(lambda self: None, factory) is not None
    drafts.attn_backend_wrapper_for_draft_decode = drafts.attn_backend_wrapper_for_draft_extend = lambda runner, one: [
        one
    ]
    for make in (sglang_plugin.draft_decode, sglang_plugin.draft_extend):
        with pytest.raises(
            ValueError, match=r"^specdec: the draft has layers of several kinds, expected attention alone$"
        ):
            make(lambda self: None, factory)


@pytest.mark.parametrize("version", VERSIONS)
def test_hook_registry_replaces_functions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the hook registry alone: a function is replaced in its module and in modules that imported it."""
    path = sources_of("sglang", version) / "sglang" / "srt" / "plugins" / "hook_registry.py"
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
