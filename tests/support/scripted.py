"""Answers of a server that are known beforehand: a grammar that allows one text, which the server knows nothing of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from specdec_kernels.engine import SamplingParams
from support.server_thread import Running


@contextmanager
def scripted(running: Running, *texts: str) -> Iterator[list[list[int]]]:
    """Let the next requests of a server with grammars generate these texts; yield the prompts that they have."""
    tasks = running.app.state.server.tasks
    left, submit = list(texts), tasks.submit_tokens
    prompts: list[list[int]] = []

    def submit_scripted(token_lists: Sequence[list[int]], params: Sequence[SamplingParams], **options: Any) -> Any:
        if params[0].constraint[0]:
            return submit(token_lists, params, **options)
        prompts.extend(token_lists)
        text = left.pop(0) if len(left) > 1 else left[0]
        grammar = f"root ::= {json.dumps(text, ensure_ascii=False)}"
        return submit(token_lists, [replace(one, grammar=grammar, min_new_tokens=0) for one in params], **options)

    tasks.submit_tokens = submit_scripted
    try:
        yield prompts
    finally:
        tasks.submit_tokens = submit
