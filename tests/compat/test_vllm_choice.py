"""compat.vllm.choice: which layers get our attention in vLLM, on a stub for its platform."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import pytest

from specdec_kernels.compat.vllm.choice import VARIABLE, share_layers

OURS, FLASH, TRITON = (
    "ours.SpecdecBackend",
    "theirs.flash.FlashAttentionBackend",
    "theirs.triton.TritonAttentionBackend",
)
MLA = "theirs.mla.FlashAttnMLABackend"
logger = logging.getLogger("vllm.specdec_kernels")


class Config(NamedTuple):
    """A layer, like vLLM's `AttentionSelectorConfig`."""

    head_size: int = 128
    use_mla: bool = False
    dtype: str = "bfloat16"


class Backend:
    """A member of vLLM's enumeration of backends."""

    def __init__(self, path: str) -> None:
        self.path = path

    def get_path(self) -> str:
        return self.path

    def get_class(self) -> Backend:
        return self

    def validate_configuration(self, device_capability: Any, use_mla: bool, **others: Any) -> list[str]:
        assert device_capability == (9, 0)
        return ["MLA not supported"] if use_mla else []


custom, flash = Backend(OURS), Backend(FLASH)


@pytest.fixture
def platform() -> Any:
    """Return a platform that chooses between our attention and its own."""

    class Platform:
        @classmethod
        def get_device_capability(cls) -> tuple[int, int]:
            return 9, 0

        @classmethod
        def get_attn_backend_cls(
            cls, selected_backend: Backend | None, attn_selector_config: Config, num_heads: int | None = None
        ) -> str:
            """Return what is asked for, or what vLLM would choose on Hopper."""
            assert num_heads == 32
            if selected_backend is not None:
                return selected_backend.path
            if attn_selector_config.use_mla:
                return MLA
            return TRITON if attn_selector_config.dtype == "float32" else FLASH

    share_layers(Platform, custom, flash, logger)
    return Platform


def chosen(platform: Any, backend: Backend | None, **layer: Any) -> str:
    """Return the backend of a layer, asked for as vLLM's selector does."""
    return str(platform.get_attn_backend_cls(backend, attn_selector_config=Config(**layer), num_heads=32))


def test_layers_keep_flash_attention_where_vllm_chooses_it(platform: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert [chosen(platform, custom) for _ in range(2)] == [FLASH, FLASH]
    assert caplog.messages == [
        "specdec: layers of head size 128 have vLLM's FlashAttentionBackend: vLLM verifies chains, where ours is not "
        "faster (SPECDEC_VLLM_ATTENTION=own selects ours)"
    ]


def test_layers_get_our_attention_where_vllm_chooses_another_backend(
    platform: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert chosen(platform, custom, dtype="float32") == OURS
    assert not caplog.messages


def test_variable_selects_our_attention(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "own")
    assert chosen(platform, custom) == OURS


@pytest.mark.parametrize("value", ["auto", "own"])
def test_layers_that_ours_cannot_serve_keep_the_backend_of_vllm(
    value: str, platform: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(VARIABLE, value)
    assert chosen(platform, custom, use_mla=True, head_size=576) == MLA
    assert caplog.messages == ["specdec: layers of head size 576 have vLLM's FlashAttnMLABackend: MLA not supported"]


def test_unknown_value_of_the_variable_is_refused(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(ValueError, match=r"^specdec: SPECDEC_VLLM_ATTENTION is '1', expected 'auto' or 'own'$"):
        chosen(platform, custom)
    assert chosen(platform, None) == FLASH


def test_layers_of_other_backends_are_chosen_as_before(platform: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert chosen(platform, flash) == FLASH and chosen(platform, Backend("others.Backend")) == "others.Backend"
    assert chosen(platform, None) == FLASH and chosen(platform, None, use_mla=True) == MLA
    assert not caplog.messages


def test_selection_is_replaced_once_also_in_a_subclass(platform: Any) -> None:
    first = platform.get_attn_backend_cls.__func__
    share_layers(platform, custom, flash, logger)
    share_layers(type("Nvml", (platform,), {}), custom, flash, logger)
    assert platform.get_attn_backend_cls.__func__ is first
