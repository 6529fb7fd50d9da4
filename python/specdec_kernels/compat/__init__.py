"""What other engines call, under their names: `compat.sglang` and `compat.vllm` (docs/integrations.md)."""
