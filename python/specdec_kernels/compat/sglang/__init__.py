"""Drop-in functions for SGLang's speculative kernels, and the plugin that registers in SGLang."""

from . import functions
from .functions import *  # noqa: F403

__all__ = functions.__all__
