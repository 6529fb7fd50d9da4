"""One model on several GPUs of a host: its ranks, and how they stay the same (docs/tensor_parallel.md)."""
