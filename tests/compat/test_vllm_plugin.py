"""compat.vllm: the plugin, on vLLM's own base classes where its sources are, else on stubs.

The sources come from an installed vLLM, or from unpacked wheels: SPECDEC_ENGINE_SOURCES is a list of folders, separated by
colons, also of several versions. With the mark `contracts` they come from the package index. Only registries and base
classes of vLLM are run.
"""

from __future__ import annotations

import functools
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
from specdec_kernels.compat.contracts import Contract, Lines, Names, Part, Sources, broken_parts
from specdec_kernels.compat.vllm import plugin
from specdec_kernels.compat.vllm.attention import PagedAttention, RowsBuilder
from specdec_kernels.compat.vllm.contracts import ATTENTION, NGRAM_PROPOSER, RUNNER, VERSIONS
from specdec_kernels.compat.vllm.ngram import NgramProposer
from support.engine_sources import sources_of

ROOT = Path(__file__).resolve().parents[2]
KV_LAYOUT = "vllm.v1.attention.backends.utils"
REAL = (
    "vllm.platforms.cuda", "vllm.platforms.interface", "vllm.utils.import_utils", "vllm.v1.attention.backend",
    "vllm.v1.attention.backends.registry", "vllm.v1.attention.selector",
)  # fmt: skip
FLASH = ("vllm.v1.attention.backends.flash_attn", "FlashAttentionBackend", False)
FLASH_MLA = ("vllm.v1.attention.backends.mla.flashattn_mla", "FlashAttnMLABackend", True)
CONFIG = "vllm.config.vllm:VllmConfig"

# What docs/integrations/vllm.md says about vLLM, and no part relies on.
DOCUMENTED: tuple[Contract, ...] = (
    # The reason in the log for layers of latent attention.
    Lines("vllm.v1.attention.backend:AttentionBackend.validate_configuration", "MLA not supported"),
    # Layers of another kind can have another backend; recurrent layers always have their own.
    Lines(
        "vllm.v1.attention.selector:get_attn_backend", "backend = attention_config.backend_per_kind.get(kind.value, backend)"
    ),
    Names("vllm.v1.kv_cache_interface:KVCacheSpecKind", ("FULL_ATTENTION", "MLA_ATTENTION", "SLIDING_WINDOW")),
    Lines(
        "vllm.v1.attention.selector:_cached_get_mamba_attn_backend", "mamba_attn_backend = mamba_type.get_class()"
    ),
    # Blocks of hybrid models are as large as the recurrent state, in multiples of what the backend supports.
    Lines("vllm.platforms.interface:Platform._align_hybrid_block_size", "s.base if isinstance(s, MultipleOf) else s"),
    Lines("vllm.v1.worker.utils:select_common_block_size", "return kv_manager_block_size"),
    # A custom proposer runs in model runner V1, which vLLM chooses by itself; if V2 is forced, vLLM does not start.
    Lines(
        f"{CONFIG}._get_v2_model_runner_unsupported_features",
        "unsupported.append(f\"speculative method '{speculative_config.method}'\")",
    ),
    Lines(
        f"{CONFIG}.use_v2_model_runner",
        "if unsupported:\n        logger.warning_once('Model Runner V2 does not yet support %s; using the V1 model runner instead.'"
        ", ', '.join(unsupported))\n        return False",
    ),
    Lines(f"{CONFIG}.use_v2_model_runner", "use_v2_model_runner = envs.VLLM_USE_V2_MODEL_RUNNER"),
    Lines(
        f"{CONFIG}._validate_v2_model_runner",
        "raise ValueError(f\"Model Runner V2 does not yet support: {', '.join(unsupported)}\")",
    ),
    Lines(RUNNER, "hasattr(self.drafter, 'load_model')"),
)  # fmt: skip


def indexed(version: str, folder: Path) -> Path:
    """Write the modules that the tests read or run, from a wheel of the package index, to a folder, and return it."""
    spec = importlib.util.spec_from_file_location("read_contracts", ROOT / "packaging" / "read_contracts.py")
    assert spec is not None and spec.loader is not None
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    wheel = reader.wheel_sources(*reader.wheel_of("vllm", version))
    for module in {*REAL, *(contract.place.partition(":")[0] for contract in DOCUMENTED)}:
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wheel.text_of(module))
    return folder


@pytest.fixture(
    scope="module",
    params=[*VERSIONS, *(pytest.param(f"{known} of the index", marks=pytest.mark.contracts) for known in VERSIONS)],
)
def vllm_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    version, _, is_indexed = request.param.partition(" ")
    return indexed(version, tmp_path_factory.mktemp("vllm")) if is_indexed else sources_of("vllm", version)


# --- vLLM's sources ---


def test_sources_do_what_the_page_says(vllm_folder: Path) -> None:
    assert broken_parts([Part("page", DOCUMENTED)], Sources.of_folder(vllm_folder)) == {}


class Anything(types.ModuleType):
    """A stub for a module of vLLM, and for any name in it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


class Stubs:
    """A finder that gives `Anything` for every module of vLLM except those in `REAL`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "vllm":
            return None
        if "backends." in name and name not in (*REAL, KV_LAYOUT, FLASH[0], FLASH_MLA[0]) and not name.endswith(".mla"):
            raise ImportError(name)  # vLLM does not choose a backend that it cannot import
        if name in REAL:
            return importlib.util.spec_from_file_location(
                name, self.folder.joinpath(*name.split(".")).with_suffix(".py")
            )
        return importlib.util.spec_from_loader(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        return Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "vllm.distributed.parallel_state":
            module.get_dcp_group = module.get_pcp_group = no_group  # type: ignore[attr-defined]
            module.get_dcp_world_size_and_rank = lambda asked: (1, 0)  # type: ignore[attr-defined]
        if module.__name__ == "vllm.config":
            module.get_current_vllm_config_or_none = lambda: None  # type: ignore[attr-defined]
        if module.__name__ == "vllm.platforms":
            module.current_platform = type("Own", (Platform,), {})()  # type: ignore[attr-defined]
        if module.__name__ == "vllm.third_party.pynvml":
            module.nvmlDeviceGetCount = lambda: 1  # type: ignore[attr-defined]
        for place, name, is_mla in (FLASH, FLASH_MLA):
            if module.__name__ == place:
                base = importlib.import_module("vllm.v1.attention.backend").AttentionBackend
                setattr(module, name, type(name, (base,), {"__module__": place, "is_mla": lambda mla=is_mla: mla}))
        if module.__name__ == "vllm.logger":
            module.init_logger = logger_of  # type: ignore[attr-defined]


def logger_of(name: str) -> logging.Logger:
    """Return a logger with vLLM's methods."""
    log = logging.getLogger(name)
    for level in ("debug", "info", "warning"):
        setattr(log, f"{level}_once", getattr(log, level))
    return log


class Platform:
    """A stub for vLLM's platform, which chooses FlashAttention without a flag."""

    is_on_cuda = True

    def is_cuda(self) -> bool:
        return self.is_on_cuda

    @classmethod
    def get_device_capability(cls) -> Any:
        return types.SimpleNamespace(major=9, minor=0)

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        if selected_backend is None:
            return "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
        return str(selected_backend.get_path())


def no_group() -> None:
    raise AssertionError("there is no group of processes")


def modules_of_vllm() -> list[str]:
    """Return the imported modules of vLLM, and ours that has its base classes."""
    ours = "specdec_kernels.compat.vllm.backend"
    return [name for name in sys.modules if name.partition(".")[0] == "vllm" or name == ours]


@pytest.fixture
def backend(vllm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import compat.vllm.backend on vLLM's own base classes."""
    for name in modules_of_vllm():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Stubs(vllm_folder), *sys.meta_path])
    monkeypatch.setattr(specdec_kernels, "cuda_version", "13.0")
    yield importlib.import_module("specdec_kernels.compat.vllm.backend")
    for name in modules_of_vllm():
        del sys.modules[name]


def configuration(**changes: Any) -> dict[str, Any]:
    """Return the arguments of `validate_configuration` for a layer."""
    fields: dict[str, Any] = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None, "use_mla": False,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": types.SimpleNamespace(major=9, minor=0), "attn_type": "decoder",
    }  # fmt: skip
    return fields | changes


def test_backend_classes_implement_interface(backend: Any) -> None:
    """No method stays abstract, and overriding methods have the arguments of the base."""
    theirs = sys.modules["vllm.v1.attention.backend"]
    config = types.SimpleNamespace(
        scheduler_config=types.SimpleNamespace(max_num_seqs=2, max_num_batched_tokens=8),
        parallel_config=types.SimpleNamespace(), cache_config=None, model_config=None,
    )  # fmt: skip
    spec = types.SimpleNamespace(block_size=16, head_size=64)
    builder = backend.SpecdecBuilder(spec, ["layer"], config, torch.device("cpu"))
    layer = backend.SpecdecImpl(4, 64, 0.125, 2, None, None, "auto", None, theirs.AttentionType.DECODER, None)
    assert isinstance(builder, theirs.AttentionMetadataBuilder) and isinstance(layer, theirs.AttentionImpl)
    assert builder.get_cudagraph_support(config, spec) is theirs.AttentionCGSupport.ALWAYS
    if hasattr(builder, "use_cascade_attention"):  # later versions have none
        assert builder.use_cascade_attention(*[0] * 9) is False
    assert backend.SpecdecBackend().get_impl_cls() is backend.SpecdecImpl
    assert backend.SpecdecBackend.get_builder_cls() is backend.SpecdecBuilder
    for ours, base in [
        (backend.SpecdecBackend, theirs.AttentionBackend), (PagedAttention, theirs.AttentionImpl),
        (RowsBuilder, theirs.AttentionMetadataBuilder),
    ]:  # fmt: skip
        shared = {name for name in vars(ours) if callable(getattr(ours, name)) and hasattr(base, name)}
        for name in shared - {"__module__", "__doc__", "__class_getitem__"}:
            have, want = (list(inspect.signature(getattr(each, name)).parameters) for each in (ours, base))
            assert have[: len(want)] == want, name


def test_backend_refuses_unsupported_configurations(backend: Any) -> None:
    validate = backend.SpecdecBackend.validate_configuration
    for changes in (
        {}, {"kv_cache_dtype": "fp8"}, {"block_size": 64}, {"has_sliding_window": True}, {"head_size": 256},
        {"dtype": torch.float32}, {"use_kv_connector": True}, {"block_size": 528},
    ):  # fmt: skip
        assert validate(**configuration(**changes)) == [], changes
    for change, reason in [
        ({"head_size": 96}, "head_size not supported"),
        ({"dtype": torch.float64}, "dtype not supported"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype float16 not supported for bfloat16 queries"),
        ({"block_size": 8}, "block_size not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"has_sink": True}, "attention sinks not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"use_per_head_quant_scales": True}, "per-head quant scales not supported"),
        ({"device_capability": types.SimpleNamespace(major=7)}, "compute capability not supported"),
        ({"attn_type": "encoder_decoder"}, "attention type encoder_decoder not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
        ({"use_pcp": True}, "PCP not supported"),
    ]:
        assert validate(**configuration(**change)) == [reason], change
    # Versions without these checks leave them to the builder.
    if hasattr(backend.SpecdecBackend, "supports_rswa"):
        assert validate(**configuration(use_dcp=True)) == ["DCP not supported"]
        assert validate(**configuration(use_rswa=True)) == ["R-SWA not supported"]


def test_backend_serves_adaptive_verification(backend: Any) -> None:
    validate = backend.SpecdecBackend.validate_configuration
    if "use_adaptive_verification" not in inspect.signature(validate).parameters:
        pytest.skip("vLLM has it since 0.28")
    assert validate(**configuration(use_adaptive_verification=True)) == []


def test_backend_refuses_build_without_cuda(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "cuda_version", None)
    assert backend.SpecdecBackend.validate_configuration(**configuration()) == [
        "this build of specdec_kernels has no CUDA kernels"
    ]


def test_backend_serves_large_blocks_of_hybrid_models_whole(backend: Any) -> None:
    """VLLM keeps a size that is a multiple of what the backend supports, and splits other blocks."""
    (size,) = backend.SpecdecBackend.get_supported_kernel_block_sizes()
    assert size.base == 16
    assert backend.SpecdecBackend.supports_block_size(528) and not backend.SpecdecBackend.supports_block_size(520)


def test_cache_layout_is_that_of_the_triton_backend(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions that ask for it get keys and values side by side, by rows or by heads."""
    assert backend.SpecdecBackend.get_kv_cache_shape(7, 16, 2, 64) == (7, 2, 16, 128)
    ours = []
    for layout in ("NHD", "HND"):
        monkeypatch.setattr(importlib.import_module(KV_LAYOUT), "get_kv_cache_layout", lambda layout=layout: layout)
        ours += [backend.SpecdecBackend.get_kv_cache_stride_order(layers) for layers in (True, False)]
    assert ours == [(1, 0, 3, 2, 4), (0, 2, 1, 3), (1, 2, 0, 3, 4), (0, 1, 2, 3)]


def test_registry_returns_our_class(
    backend: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for known in VERSIONS:
        installed(monkeypatch, f"{known}+cu130")
        with caplog.at_level(logging.INFO):
            plugin.register()
        said = f"specdec: vLLM {known}+cu130 has the attention backend CUSTOM, for those who ask for it"
        assert caplog.messages[-1] == said
    registry = sys.modules["vllm.v1.attention.backends.registry"]
    assert registry.AttentionBackendEnum.CUSTOM.get_class() is backend.SpecdecBackend
    assert backend.SpecdecBackend.get_name() == registry.AttentionBackendEnum.CUSTOM.name
    registry.register_backend(registry.AttentionBackendEnum.CUSTOM, "others.Backend")
    plugin.register()
    assert caplog.messages[-1] == "specdec: the attention backend CUSTOM is others.Backend; nothing is changed"
    assert registry.AttentionBackendEnum.CUSTOM.get_path() == "others.Backend"


def test_selection_of_vllm_keeps_its_backends_where_ours_does_not_win_or_serve(
    backend: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On vLLM's own choice of backends, for Hopper."""
    cuda = importlib.import_module("vllm.platforms.cuda")
    selector = importlib.import_module("vllm.v1.attention.selector")
    hopper = importlib.import_module("vllm.platforms.interface").DeviceCapability(9, 0)
    platform = type("Platform", (cuda.CudaPlatform,), {"get_device_capability": classmethod(lambda cls: hopper)})
    monkeypatch.setattr(importlib.import_module("vllm.platforms"), "current_platform", platform())
    installed(monkeypatch, VERSIONS[0])
    plugin.register()
    custom = sys.modules["vllm.v1.attention.backends.registry"].AttentionBackendEnum.CUSTOM

    def chosen(asked: Any, **changes: Any) -> str:
        """Return the path of a layer's backend, as vLLM's selector asks for it."""
        layer = selector.AttentionSelectorConfig(128, torch.bfloat16, "auto", None, **changes)
        return str(platform.get_attn_backend_cls(asked, attn_selector_config=layer, num_heads=32))

    caplog.set_level(logging.INFO)
    assert chosen(custom) == chosen(None) == ".".join(FLASH[:2])
    assert chosen(custom, use_mla=True) == chosen(None, use_mla=True) == ".".join(FLASH_MLA[:2])
    assert [said for said in caplog.messages if "MLA" in said and said.startswith("specdec")] == [
        "specdec: layers of head size 128 have vLLM's FlashAttnMLABackend: MLA not supported"
    ]
    monkeypatch.setenv("SPECDEC_VLLM_ATTENTION", "own")
    assert chosen(custom) == plugin.PATH and chosen(None) == ".".join(FLASH[:2])


# --- the plugin on stubs ---


def installed(monkeypatch: pytest.MonkeyPatch, found: str | None, record: dict[str, Any] | None = None) -> None:
    """Let vLLM be installed in a version, or not, in whose sources the contracts read a record."""

    def version(package: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(version_gate, "version", version)
    gate = functools.partial(version_gate.parts_to_take_over, sources_of=lambda package: record)
    monkeypatch.setattr(plugin, "parts_to_take_over", gate)


def record_of(version: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "tests" / "compat" / "contracts" / f"vllm-{version}.json").read_text()))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace vLLM's registry by a stub, and return the list of paths that are registered there."""
    registry = types.ModuleType("vllm.v1.attention.backends.registry")
    paths: list[str] = []
    custom = types.SimpleNamespace(is_overridden=lambda: bool(paths), get_path=lambda: paths[-1])
    registry.AttentionBackendEnum = {"CUSTOM": custom, "FLASH_ATTN": custom}  # type: ignore[attr-defined]
    registry.register_backend = lambda backend, path: paths.append(path)  # type: ignore[attr-defined]
    registry.current_platform = type("Own", (Platform,), {})()  # type: ignore[attr-defined]
    modules = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends", "vllm.platforms")
    for name in (*modules, registry.__name__):
        monkeypatch.setitem(sys.modules, name, registry)
    return paths


def test_entry_point_is_register() -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["specdec"].partition(":")
    assert getattr(importlib.import_module(module), name) is plugin.register


def test_plugin_registers_as_custom_also_twice(registered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, VERSIONS[0])
    plugin.register()
    plugin.register()
    assert set(registered) == {plugin.PATH} == {"specdec_kernels.compat.vllm.backend.SpecdecBackend"}


def test_plugin_changes_nothing_without_cuda(
    registered: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch, VERSIONS[-1])
    monkeypatch.setattr(Platform, "is_on_cuda", False)
    plugin.register()
    assert not registered and caplog.messages == ["specdec: vLLM does not run on CUDA here; nothing is changed"]


def test_untested_version_gets_what_its_sources_allow(
    registered: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch, "0.34.0", record_of("0.33.0"))
    plugin.register()
    assert registered == [plugin.PATH]
    assert caplog.messages == [
        "specdec: vLLM 0.34.0 is not tested (0.26.0 to 0.33.0 are); by its sources it gets attention, n-gram proposer"
    ]


CHANGED_BUILD = "Parameters vllm.v1.attention.backend:AttentionMetadataBuilder.build"
CHANGED_CALL = next(key for key in record_of("0.33.0") if "propose(sampled_token_ids" in key)


def test_changed_signature_of_a_base_class_leaves_attention_to_vllm(
    registered: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    changed = {CHANGED_BUILD: ["self", "common_attn_metadata", "prefix_len"]}
    installed(monkeypatch, "0.34.0", record_of("0.33.0") | changed)
    plugin.register()
    assert not registered
    assert caplog.messages == [
        "specdec: vLLM 0.34.0 is not tested (0.26.0 to 0.33.0 are); by its sources it gets n-gram proposer; without "
        "attention (vllm.v1.attention.backend:AttentionMetadataBuilder.build has the parameters (self, "
        "common_attn_metadata, prefix_len), expected (self, common_prefix_len, common_attn_metadata, fast_build))"
    ]
    assert set(plugin.takeover().left) == {ATTENTION}


def test_changed_call_of_proposers_is_refused_when_vllm_makes_ours(
    registered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, "0.34.0", record_of("0.33.0") | {CHANGED_CALL: 0})
    plugin.register()
    assert registered == [plugin.PATH]
    assert set(plugin.takeover().left) == {NGRAM_PROPOSER}
    config = types.SimpleNamespace(
        speculative_config=types.SimpleNamespace(num_speculative_tokens=4),
        model_config=types.SimpleNamespace(max_model_len=64),
        scheduler_config=types.SimpleNamespace(max_num_seqs=4),
    )
    with pytest.raises(ValueError, match=r"^NgramProposer: this version of vLLM is not tested, and vllm.v1.worker"):
        NgramProposer(config)


def test_version_without_readable_sources_gets_nothing(
    registered: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch, "0.34.0")
    plugin.register()
    assert not registered
    assert len(caplog.messages) == 1 and "it gets nothing; without attention (its sources" in caplog.messages[0]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("0.25.1", "specdec: vLLM 0.25.1 is older than 0.26.0, the first tested version; nothing is changed"),
        (None, "specdec: the version of vLLM is not known; nothing is changed"),
    ],
)
def test_older_or_unknown_version_is_left_alone(
    found: str | None, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch, found)
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing vllm fails
    plugin.register()
    assert caplog.messages == [said]


def test_vllm_starts_if_its_registry_is_not_as_expected(
    registered: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.modules["vllm.v1.attention.backends.registry"], "AttentionBackendEnum", {})
    installed(monkeypatch, VERSIONS[-1])
    plugin.register()
    assert not registered and caplog.messages == ["specdec: KeyError: 'CUSTOM'; nothing is changed"]


def test_plugin_is_disabled_by_variable(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SPECDEC_VLLM", "0")
    installed(monkeypatch, VERSIONS[0])
    monkeypatch.setitem(sys.modules, "vllm", None)
    plugin.register()
    assert not caplog.messages
