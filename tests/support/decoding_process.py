"""The process that decodes migrated requests, in a file of its own: the process imports nothing else."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from specdec_kernels.engine import Eagle3, Engine


def decode(connection: Connection, target: Path, head: Path, device: str) -> None:
    """Continue each request that arrives until the sender stops, and send back its tokens."""
    draft = Eagle3(head, num_steps=3, topk=3, num_nodes=10)
    options = {"max_len": 256, "num_slots": 4, "page_size": 16, "dtype": torch.float32, "device": device}
    with Engine(target, draft=draft, adaptive=False, **options) as engine:
        while data := connection.recv_bytes():
            connection.send(engine.import_request(pickle.loads(data)).result().tokens)
