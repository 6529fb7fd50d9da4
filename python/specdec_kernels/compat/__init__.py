"""Plugins for SGLang and vLLM, and functions under those engines' own names (docs/integrations/)."""
