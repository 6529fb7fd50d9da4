"""One small file for each family of models: how the modules that transformers loads become the parts of a decoder."""

from .afmoe import Afmoe
from .apertus import Apertus
from .arcee import Arcee, Jais2, Nemotron
from .base import (
    Decoder,
    Family,
    check_length,
    family_of,
    head_dim_of,
    known_families,
    kv_heads_of,
    kv_numbers,
    largest,
    pool_dim_of,
    position_limit,
    register,
    window_of,
)
from .cohere import Cohere, Cohere2
from .dots1 import Dots1
from .ernie4_5_moe import Ernie45Moe
from .exaone4 import Exaone4, ExaoneMoe
from .falcon import Falcon
from .flex_olmo import FlexOlmo
from .gemma import Gemma
from .gemma2 import Gemma2, VaultGemma
from .gemma3 import Gemma3
from .glm import Glm, Glm4
from .glm4_moe import Glm4Moe, SolarOpen
from .gpt_neox import GptNeoX
from .gpt_oss import GptOss
from .gptj import CodeGen, GptJ, GptNeo
from .granite import Granite, HyperClovaX
from .granite_moe import GraniteMoe, GraniteMoeShared
from .helium import Ernie45, Helium, InternLM3, IQuestCoder, SeedOss
from .hunyuan import HunYuanDense, HunYuanMoE
from .llama import Llama
from .minimax_m2 import HyV3, MiniMaxM2
from .ministral import Cwm, Ministral, Ministral3
from .mistral import Mistral
from .mixtral import Mixtral
from .olmo import Olmo
from .olmo2 import Olmo2
from .olmo3 import Olmo3
from .olmoe import Olmoe
from .phi import Phi, StableLm
from .phi3 import Phi3
from .qwen2 import Qwen2
from .qwen2_moe import Qwen2Moe
from .qwen3 import Qwen3
from .qwen3_moe import Mellum, Qwen3Moe
from .qwen_vl import Qwen2Vl, Qwen3Vl, Qwen3VlMoe, Qwen25Vl
from .smollm3 import SmolLM3
from .starcoder2 import Starcoder2

__all__ = [
    "Afmoe",
    "Apertus",
    "Arcee",
    "CodeGen",
    "Cohere",
    "Cohere2",
    "Cwm",
    "Decoder",
    "Dots1",
    "Ernie45",
    "Ernie45Moe",
    "Exaone4",
    "ExaoneMoe",
    "Falcon",
    "Family",
    "FlexOlmo",
    "Gemma",
    "Gemma2",
    "Gemma3",
    "Glm",
    "Glm4",
    "Glm4Moe",
    "GptJ",
    "GptNeo",
    "GptNeoX",
    "GptOss",
    "Granite",
    "GraniteMoe",
    "GraniteMoeShared",
    "Helium",
    "HunYuanDense",
    "HunYuanMoE",
    "HyV3",
    "HyperClovaX",
    "IQuestCoder",
    "InternLM3",
    "Jais2",
    "Llama",
    "Mellum",
    "MiniMaxM2",
    "Ministral",
    "Ministral3",
    "Mistral",
    "Mixtral",
    "Nemotron",
    "Olmo",
    "Olmo2",
    "Olmo3",
    "Olmoe",
    "Phi",
    "Phi3",
    "Qwen2",
    "Qwen2Moe",
    "Qwen2Vl",
    "Qwen3",
    "Qwen3Moe",
    "Qwen3Vl",
    "Qwen3VlMoe",
    "Qwen25Vl",
    "SeedOss",
    "SmolLM3",
    "SolarOpen",
    "StableLm",
    "Starcoder2",
    "VaultGemma",
    "check_length",
    "family_of",
    "head_dim_of",
    "known_families",
    "kv_heads_of",
    "kv_numbers",
    "largest",
    "pool_dim_of",
    "position_limit",
    "register",
    "window_of",
]
