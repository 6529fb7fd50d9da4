"""Paths of the small trained models: inside an installed wheel, or in the source tree of an editable install."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def tiny_model(name: str) -> Path:
    """Return the folder of "target" or "eagle3" (see examples/tiny/README.md)."""
    for root in (_PACKAGE / "tiny_model", _PACKAGE.parents[1] / "examples" / "tiny"):
        if (root / name / "config.json").exists():
            return root / name
    raise FileNotFoundError(f"tiny model {name!r} is not in this installation of specdec_kernels")
