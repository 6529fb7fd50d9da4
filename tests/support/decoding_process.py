"""What another process does with requests that come to it, in a file of its own, which is all that it imports."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from specdec_kernels.engine import Eagle3, Engine


def decode(connection: Connection, target: Path, head: Path, device: str) -> None:
    """Goes on with each until nothing comes, and sends back its tokens."""
    draft = Eagle3(head, num_steps=3, topk=3, num_nodes=10)
    options = {"max_len": 256, "num_slots": 4, "page_size": 16, "dtype": torch.float32, "device": device}
    with Engine(target, draft=draft, adaptive=False, **options) as engine:
        while data := connection.recv_bytes():
            connection.send(engine.import_request(pickle.loads(data)).result().tokens)
