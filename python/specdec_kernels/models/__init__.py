"""Hugging Face models over our paged KV: the target, EAGLE-3 heads, and small standalone drafts."""
