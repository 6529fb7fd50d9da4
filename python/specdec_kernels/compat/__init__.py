"""Plugins for SGLang and vLLM, a drafter for TensorRT-LLM, and functions under those engines' own names.

docs/integrations/ describes them.
"""
