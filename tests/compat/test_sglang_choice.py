"""compat.sglang.choice: which attention SGLang gets, on stubs of its arguments in both of their forms."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

from specdec_kernels.compat.sglang import choice as sglang_choice
from specdec_kernels.compat.sglang.contracts import VERSIONS, host_of

TREES = {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 4}
CHAINS = {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 1}


def model(**changes: Any) -> Any:
    """Return a stub of SGLang's ModelConfig."""
    fields: dict[str, Any] = {
        "head_dim": 128, "v_head_dim": 128, "is_encoder_decoder": False, "has_attention_sinks": False,
        "attention_chunk_size": None, "is_hybrid_swa": False, "is_latent": False,
        "hf_config": SimpleNamespace(architectures=["Qwen3ForCausalLM"]),
    }  # fmt: skip
    return SimpleNamespace(**fields | changes)


class Arguments:
    """A stub of ServerArgs: `declares` selects the form of 0.5.19 and later, where steps declare their results."""

    device = "hopper"

    def __init__(self, declares: bool, config: Any, given: dict[str, Any]) -> None:
        self.declares, self.config = declares, config
        self.model_path, self.page_size = "model", None
        self.attention_backend: str | None = None
        self.prefill_attention_backend: str | None = None
        self.decode_attention_backend: str | None = None
        self.speculative_draft_attention_backend: str | None = None
        self.speculative_algorithm: str | None = None
        self.speculative_eagle_topk: int | None = None
        self.speculative_adaptive = False
        vars(self).update(given)
        self.declared: dict[str, Any] = {}

    def get_model_config(self) -> Any:
        assert not self.declares
        return self.config

    def use_mla_backend(self) -> bool:
        assert not self.declares
        return bool(self.config.is_latent)

    def _get_default_attn_backend(self, use_mla_backend: bool, model_config: Any) -> str:
        assert not self.declares
        return self.default(use_mla_backend, model_config)

    def default(self, use_mla_backend: bool, model_config: Any) -> str:
        """Choose as SGLang does."""
        assert not use_mla_backend and model_config is self.config
        chains = self.speculative_eagle_topk == 1 and self.page_size in (None, 1)
        return "fa3" if self.device == "hopper" and (self.speculative_eagle_topk is None or chains) else "flashinfer"

    def resolved(self) -> list[str | None]:
        return [self.declared.get(name, getattr(self, name)) for name in sglang_choice.FIELDS]


@pytest.fixture(params=[False, True], ids=["assigned", "declared"])
def declares(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Install stubs of the modules that resolve arguments, and return the form of the arguments."""

    def declare_resolution(server_args: Arguments, source: str, **fields: Any) -> None:
        assert request.param and source == "specdec"
        server_args.declared |= fields

    view = SimpleNamespace(
        resolved_view=lambda args: SimpleNamespace(**vars(args) | args.declared), declare_resolution=declare_resolution
    )
    model_override_base = SimpleNamespace(
        model_config_of=lambda args: args.config,
        use_mla_backend=lambda args: args.config.is_latent,
        get_default_attn_backend=lambda args, use_mla_backend, config: args.default(use_mla_backend, config),
    )
    speculative_hook = SimpleNamespace(
        _auto_choose_speculative_params=lambda args, arch: (5, 4, 8) if arch == "LlamaForCausalLM" else (3, 1, 4)
    )
    modules = {"overrides": view, "speculative_hook": speculative_hook}
    modules |= {"model_override_base": model_override_base} if request.param else {}
    common = types.ModuleType("sglang.srt.utils.common")
    common.is_hopper_with_cuda_12_3 = lambda: Arguments.device == "hopper"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, common.__name__, common)
    for name in ("sglang", "sglang.srt", "sglang.srt.arg_groups", "sglang.srt.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"sglang.srt.arg_groups.{name}", module)
    monkeypatch.delenv(sglang_choice.VARIABLE, raising=False)
    return bool(request.param)


def chosen(declares: bool, config: Any = None, **given: Any) -> list[str | None]:
    """Return the backends that SGLang goes on with: common, prefill, decode, drafts."""
    args, calls = Arguments(declares, config or model(), {"attention_backend": "specdec"} | given), []
    result = sglang_choice.choose_attention(lambda args: calls.append(args) or "result", args, declares=declares)
    assert result == "result" and calls == [args]
    return args.resolved()


def test_forms_are_those_of_the_versions() -> None:
    assert [known for known in VERSIONS if not host_of(known).declares_arguments] == ["0.5.17", "0.5.18"]


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ({}, "nothing is drafted"),
        (CHAINS, "drafts are chains"),
        ({"speculative_algorithm": "EAGLE"}, "drafts are chains"),  # as SGLang chooses for this model
        ({"speculative_algorithm": "STANDALONE", "speculative_adaptive": True}, "drafts are chains"),
    ],
)
def test_plain_decoding_and_chains_get_fa3_and_say_so(
    declares: bool, given: dict[str, Any], start: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert chosen(declares, **given) == [None] * 4  # SGLang's default is fa3
    assert caplog.messages == [
        f"specdec: {start}, so SGLang's own attention (fa3) runs all phases; SPECDEC_SGLANG_ATTENTION=own selects "
        "specdec's"
    ]


def test_phases_follow_the_common_backend_or_get_fa3_by_name(declares: bool) -> None:
    ours = {"decode_attention_backend": "specdec", "speculative_draft_attention_backend": "specdec"}
    assert chosen(declares, **CHAINS, **ours) == [None] * 4
    assert chosen(declares, **CHAINS, **ours, attention_backend=None) == [None] * 4
    assert chosen(declares, **CHAINS, **ours, attention_backend="triton") == ["triton", None, "fa3", "fa3"]
    others = {"prefill_attention_backend": "triton"}
    assert chosen(declares, **others) == [None, "triton", None, None]


@pytest.mark.parametrize(
    "given",
    [
        TREES,
        {"speculative_algorithm": "NGRAM"},
        {"speculative_algorithm": "SPECDEC_NGRAM"},
        {"speculative_algorithm": "EAGLE3", "config": model(hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]))},
        {"attention_backend": "specdec", "model_path": "instance://somewhere", "config": model(is_latent=True)},
    ],
)  # fmt: skip
def test_trees_get_ours(declares: bool, given: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(declares, **given) == ["specdec", None, None, None]
    assert not caplog.messages


def test_devices_without_fa3_get_ours(declares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arguments, "device", "ampere")
    for given in ({}, CHAINS):
        assert chosen(declares, **given) == ["specdec", None, None, None]


def test_chains_with_larger_pages_get_fa3_by_name(declares: bool) -> None:
    """SGLang's default for them is another."""
    assert chosen(declares, **CHAINS, page_size=16) == ["fa3", None, None, None]
    assert chosen(declares, **CHAINS, page_size=16, decode_attention_backend="specdec") == ["fa3", None, "fa3", None]


def test_variable_selects_ours(declares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_SGLANG_ATTENTION", "own")
    assert chosen(declares, **CHAINS) == ["specdec", None, None, None]
    monkeypatch.setenv("SPECDEC_SGLANG_ATTENTION", "auto")
    assert chosen(declares, **CHAINS) == [None] * 4
    monkeypatch.setenv("SPECDEC_SGLANG_ATTENTION", "fa3")
    with pytest.raises(ValueError, match=r"^specdec: SPECDEC_SGLANG_ATTENTION is 'fa3', expected 'auto' or 'own'$"):
        chosen(declares)


def test_other_backends_are_untouched(declares: bool, caplog: pytest.LogCaptureFixture) -> None:
    for name in (None, "triton"):
        assert chosen(declares, attention_backend=name) == [name, None, None, None]
    assert not caplog.messages


@pytest.mark.parametrize(
    ("changes", "given", "reason"),
    [
        ({"is_latent": True}, TREES, "the model has latent attention (MLA)"),
        ({"is_encoder_decoder": True}, TREES, "the model has an encoder"),
        ({"has_attention_sinks": True}, TREES, "the model has attention sinks"),
        ({"attention_chunk_size": 8192}, TREES, "layers attend within chunks of 8192 tokens"),
        ({"hf_config": SimpleNamespace(dual_chunk_attention_config={"chunk_size": 4})}, TREES,
         "the model has dual chunk attention"),
        ({"is_hybrid_swa": True}, TREES, "layers with windows have a KV pool of their own "
         "(--disable-hybrid-swa-memory gives them the common one)"),
        ({"head_dim": 96, "v_head_dim": 96}, TREES, "keys have dimension 96 and values 96"),
        ({"head_dim": 256}, TREES, "keys have dimension 256 and values 128"),
        ({}, {"speculative_algorithm": "DFLASH"}, "drafts of DFLASH are not among those that specdec verifies"),
    ],
)  # fmt: skip
def test_unknown_models_get_sglangs_attention_and_the_reason(
    declares: bool, changes: dict[str, Any], given: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert chosen(declares, model(**changes), **given) == [None] * 4
    assert caplog.messages == [f"specdec: {reason}, so SGLang's own attention runs all phases"]
    ours = {"attention_backend": "triton", "decode_attention_backend": "specdec"}
    assert chosen(declares, model(**changes), **given, **ours) == ["triton", None, None, None]
