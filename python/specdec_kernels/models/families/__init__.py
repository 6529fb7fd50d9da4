"""One file for each family of models, named as in transformers: how a loaded module becomes the layers of a decoder."""

from .afmoe import Afmoe
from .apertus import Apertus
from .arcee import Arcee
from .axk1 import AXK1
from .bamba import Bamba
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
    latent_row_of,
    pool_dim_of,
    position_limit,
    register,
    window_of,
)
from .codegen import CodeGen
from .cohere import Cohere
from .cohere2 import Cohere2
from .cwm import Cwm
from .deepseek_v2 import DeepseekV2
from .deepseek_v3 import DeepseekV3
from .dots1 import Dots1
from .ernie4_5 import Ernie45
from .ernie4_5_moe import Ernie45Moe
from .exaone4 import Exaone4
from .exaone_moe import ExaoneMoe
from .falcon import Falcon
from .falcon_h1 import FalconH1
from .flex_olmo import FlexOlmo
from .gemma import Gemma
from .gemma2 import Gemma2
from .gemma3 import Gemma3
from .glm import Glm
from .glm4 import Glm4
from .glm4_moe import Glm4Moe
from .glm4_moe_lite import Glm4MoeLite
from .gpt_neo import GptNeo
from .gpt_neox import GptNeoX
from .gpt_oss import GptOss
from .gptj import GptJ
from .granite import Granite
from .granitemoe import GraniteMoe
from .granitemoehybrid import GraniteMoeHybrid
from .granitemoeshared import GraniteMoeShared
from .helium import Helium
from .hunyuan_v1_dense import HunYuanDense
from .hunyuan_v1_moe import HunYuanMoE
from .hy_v3 import HyV3
from .hyperclovax import HyperClovaX
from .internlm3 import InternLM3
from .iquestcoder import IQuestCoder
from .jais2 import Jais2
from .kimi_linear import KimiLinear
from .lfm2 import Lfm2
from .lfm2_moe import Lfm2Moe
from .llama import Llama
from .longcat_flash import LongcatFlash
from .mellum import Mellum
from .mimo import MiMo
from .minicpm3 import MiniCPM3
from .minimax_m2 import MiniMaxM2
from .ministral import Ministral
from .ministral3 import Ministral3
from .mistral import Mistral
from .mixtral import Mixtral
from .nemotron import Nemotron
from .nemotron_h import NemotronH
from .olmo import Olmo
from .olmo2 import Olmo2
from .olmo3 import Olmo3
from .olmoe import Olmoe
from .phi import Phi
from .phi3 import Phi3
from .qwen2 import Qwen2
from .qwen2_5_vl import Qwen25Vl
from .qwen2_moe import Qwen2Moe
from .qwen2_vl import Qwen2Vl
from .qwen3 import Qwen3
from .qwen3_5 import Qwen35
from .qwen3_5_moe import Qwen35Moe
from .qwen3_moe import Qwen3Moe
from .qwen3_next import Qwen3Next
from .qwen3_vl import Qwen3Vl
from .qwen3_vl_moe import Qwen3VlMoe
from .seed_oss import SeedOss
from .smollm3 import SmolLM3
from .solar_open import SolarOpen
from .stablelm import StableLm
from .starcoder2 import Starcoder2
from .step3p5 import Step3p5
from .vaultgemma import VaultGemma
from .youtu import Youtu
from .zamba2 import Zamba2

__all__ = [
    "AXK1",
    "Afmoe",
    "Apertus",
    "Arcee",
    "Bamba",
    "CodeGen",
    "Cohere",
    "Cohere2",
    "Cwm",
    "Decoder",
    "DeepseekV2",
    "DeepseekV3",
    "Dots1",
    "Ernie45",
    "Ernie45Moe",
    "Exaone4",
    "ExaoneMoe",
    "Falcon",
    "FalconH1",
    "Family",
    "FlexOlmo",
    "Gemma",
    "Gemma2",
    "Gemma3",
    "Glm",
    "Glm4",
    "Glm4Moe",
    "Glm4MoeLite",
    "GptJ",
    "GptNeo",
    "GptNeoX",
    "GptOss",
    "Granite",
    "GraniteMoe",
    "GraniteMoeHybrid",
    "GraniteMoeShared",
    "Helium",
    "HunYuanDense",
    "HunYuanMoE",
    "HyV3",
    "HyperClovaX",
    "IQuestCoder",
    "InternLM3",
    "Jais2",
    "KimiLinear",
    "Lfm2",
    "Lfm2Moe",
    "Llama",
    "LongcatFlash",
    "Mellum",
    "MiMo",
    "MiniCPM3",
    "MiniMaxM2",
    "Ministral",
    "Ministral3",
    "Mistral",
    "Mixtral",
    "Nemotron",
    "NemotronH",
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
    "Qwen3Next",
    "Qwen3Vl",
    "Qwen3VlMoe",
    "Qwen25Vl",
    "Qwen35",
    "Qwen35Moe",
    "SeedOss",
    "SmolLM3",
    "SolarOpen",
    "StableLm",
    "Starcoder2",
    "Step3p5",
    "VaultGemma",
    "Youtu",
    "Zamba2",
    "check_length",
    "family_of",
    "head_dim_of",
    "known_families",
    "kv_heads_of",
    "kv_numbers",
    "largest",
    "latent_row_of",
    "pool_dim_of",
    "position_limit",
    "register",
    "window_of",
]
