"""Drop-in functions for vLLM, and the plugin that registers in vLLM."""

from . import functions
from .functions import *  # noqa: F403

__all__ = functions.__all__
