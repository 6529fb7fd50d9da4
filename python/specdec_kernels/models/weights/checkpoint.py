"""Checkpoint folders: finding one, recognizing what it holds, and reading its tensors. No code of it is run."""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

# Files that may hold the weights, in transformers' order of search.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")

ALL = re.compile(".*").fullmatch


class Kind(NamedTuple):
    """The kind of model in a folder."""

    words: str  # for messages
    draft: str | None  # the class that loads it as a draft


EAGLE = Kind("an EAGLE head", "Eagle")
EAGLE3 = Kind("an EAGLE-3 head", "Eagle3")
LANGUAGE_MODEL = Kind("a language model", "Standalone")
ADAPTER = Kind("an adapter of PEFT", None)
DFLASH = Kind("a DFlash drafter", "DFlash")
DFLASH2 = Kind("a DFlash2 drafter", "DFlash2")
DSPARK = Kind("a DSpark drafter", "DSpark")
MEDUSA = Kind("heads of Medusa", None)
UNKNOWN = Kind("of no known kind", None)


def expect_no_gguf(path: Path, name: str) -> None:
    """Raise a ValueError for a GGUF file, or a folder of such files alone, that says how to convert it."""
    file = path if path.suffix == ".gguf" else None
    if path.is_dir() and not (path / "config.json").exists():
        file = next(iter(sorted(path.glob("*.gguf"))), None)
    if file is not None:
        call = f"AutoModelForCausalLM.from_pretrained({str(file.parent)!r}, gguf_file={file.name!r})"
        raise ValueError(
            f"{name}: {file} is a GGUF file, expected a folder with config.json and safetensors "
            f"({call}.save_pretrained(folder) of transformers writes one, and AutoTokenizer the same way)"
        )


def expect_path(model: object, name: str) -> None:
    """Raise a ValueError for what is neither a path nor a hub id."""
    if not isinstance(model, str | Path) or model == "":
        given = "''" if model == "" else f"a {type(model).__name__}"
        raise ValueError(f"{name} is {given}, expected an existing folder or a hub id")


def expect_folder(model: str | Path | nn.Module, name: str) -> None:
    """Raise a FileNotFoundError for a path (no hub id, no module) that is no folder."""
    if isinstance(model, nn.Module):
        return
    expect_path(model, name)
    expect_no_gguf(Path(model), name)
    text = str(model)
    meant = isinstance(model, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1
    if meant and not Path(text).is_dir():
        raise FileNotFoundError(f"{name} is {text}, expected an existing folder or a hub id")


def local_folder(model: str | Path, name: str) -> Path:
    """Return the folder itself, or a hub id's snapshot."""
    expect_folder(model, name)
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(str(model), allow_patterns=["*.json", "*.safetensors", "*.bin"]))
    except HFValidationError as error:
        raise ValueError(f"{name} is {str(model)!r}, expected an existing folder or a hub id") from error
    except OSError as error:  # of the hub or the network
        reason = " ".join(str(error).split())
        raise OSError(f"{name} is {model}, expected an existing folder or a hub id ({reason})") from error


def expect_kind(model: str | Path | nn.Module, wanted: Kind, name: str) -> None:
    """Raise a ValueError for a folder (no hub id, no module) that holds something else than `wanted`."""
    if isinstance(model, nn.Module):
        return
    expect_path(model, name)
    expect_no_gguf(Path(model), name)
    if not Path(model).is_dir():
        return
    kind = kind_of(Path(model))
    if kind in (wanted, UNKNOWN):
        return
    if kind == ADAPTER:
        hint = "Engine takes one as its model, or as adapter= with its base"
    elif kind.draft is None:
        hint = "nothing here drafts with it"
    else:
        hint = f"{kind.draft} drafts with it"
    raise ValueError(f"{name}: {model} is {kind.words}, expected {wanted.words} ({hint})")


def is_adapter(folder: Path) -> bool:
    """Return whether the folder holds an adapter alone."""
    return (folder / "adapter_config.json").exists() and not (folder / "config.json").exists()


def kind_of(folder: Path) -> Kind:
    """Return the kind of a folder by its tensors' names, because many heads' configs are copies of their target's.

    A folder of UNKNOWN kind may be loaded as any: loading it reports which tensors are missing.
    """
    if is_adapter(folder):
        return ADAPTER
    if any(folder.glob("medusa_lm_head.*")):
        return MEDUSA
    if not any((folder / file).exists() for file in WEIGHTS):
        return UNKNOWN
    names = {name.removeprefix("model.") for name in tensor_names(folder)}
    if any(name.startswith(("midlayer.", "layers.0.hidden_norm.")) for name in names):
        return EAGLE3
    if any(name.startswith("markov_head.") for name in names):
        return DSPARK
    if any(name.startswith("candidate_selector.") for name in names):
        return DFLASH2
    if {"fc.weight", "hidden_norm.weight"} <= names:
        return DFLASH
    if not names.isdisjoint({"fc.weight", "fusion_fc.weight"}):
        return EAGLE
    return LANGUAGE_MODEL if {"norm.weight", "layers.0.input_layernorm.weight"} <= names else UNKNOWN


def tensor_names(folder: Path) -> list[str]:
    """Return the names of all tensors. Most formats have them in a header."""
    file = weights_file(folder)
    if file.suffix == ".json":
        return list(weight_map(file))
    if file.suffix == ".safetensors":
        with readable(file), safe_open(file, "pt") as tensors:
            return list(tensors.keys())
    return list(unpickled(file, "meta"))


def tensor_files(folder: Path) -> dict[str, str]:
    """Return the file that holds each tensor, by the tensor's name."""
    file = weights_file(folder)
    return weight_map(file) if file.suffix == ".json" else dict.fromkeys(tensor_names(folder), file.name)


class Stored(NamedTuple):
    """What a file says of a tensor: its dtype, such as F32, F8_E4M3 or I8, and its shape."""

    dtype: str
    shape: tuple[int, ...]


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Return dtype and shape of each tensor, without reading any."""
    found = dict[str, Stored]()
    files = tensor_files(folder)
    for file in sorted(set(files.values())):
        path = folder / file
        if path.suffix == ".safetensors":
            with readable(path), safe_open(path, "pt") as tensors:
                slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
                of_file = {name: Stored(each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
        else:
            of_file = {
                name: Stored(dtype_name(tensor.dtype), tuple(tensor.shape))
                for name, tensor in unpickled(path, "meta").items()
            }
        found |= {name: stored for name, stored in of_file.items() if files.get(name) == file}
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that safetensors has for a dtype, up to the kind of 8-bit float."""
    if dtype == torch.bfloat16:
        return "BF16"
    kind = "F" if dtype.is_floating_point else "C" if dtype.is_complex else "I"
    return f"{kind}{8 * dtype.itemsize}"


def float8_tensors(folder: Path) -> set[str]:
    """Return the names of the tensors in one of the float8 dtypes, without reading any."""
    return {name for name, stored in stored_tensors(folder).items() if stored.dtype.startswith("F8")}


EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")


def fault_of_experts(shapes: Mapping[str, Sequence[int]]) -> str | None:
    """Return why the experts of a layer do not fit each other, in words; None: they do.

    Some have a tensor of another shape than most, or lack one that others have. `shapes` are those of all tensors.
    """
    experts, parts = dict[str, set[str]](), dict[tuple[str, str], dict[str, tuple[int, ...]]]()
    for match in filter(None, map(EXPERT.fullmatch, sorted(shapes))):
        layer, expert, part = match.groups()
        experts.setdefault(layer, set()).add(expert)
        parts.setdefault((layer, part), {})[match[0]] = tuple(shapes[match[0]])
    for alike in parts.values():
        [(most, _)] = Counter(alike.values()).most_common(1)
        for name, shape in alike.items():
            if shape != most:
                return f"has {name} of shape {list(shape)} (other experts: {list(most)})"
    wanted = {f"{layer}{expert}{part}" for layer, part in parts for expert in experts[layer]}
    missing = sorted(wanted - shapes.keys())
    return f"lacks {some(missing)}" if missing else None


def in_a_line(error: Exception) -> str:
    """Return the kind and the text of an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def does_not_fit(what: str, why: str, part: str = "model") -> ValueError:
    """Return the error of a folder, `what`, whose tensors are not those of a `part`."""
    return ValueError(f"{what} {why}, expected every tensor of the {part} and no other")


def does_not_load(what: str, part: str, shapes: Mapping[str, Sequence[int]], error: Exception) -> ValueError:
    """Return the error of a folder, `what`, whose tensors for a `part` have these shapes and fail in transformers."""
    return does_not_fit(what, fault_of_experts(shapes) or f"has tensors that do not load ({in_a_line(error)})", part)


@dataclass
class Faults:
    """Tensors of a folder that do not fit a module.

    Attributes:
        missing, unknown: their names.
        mismatched: name, shape and expected shape of each tensor of another shape.
    """

    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, Sequence[int], Sequence[int]]] = field(default_factory=list)

    def check(self, what: str, module: nn.Module, part: str, stored_name: Callable[[str], str] = str) -> None:
        """Raise ValueError for a folder, `what`, if there is one; `stored_name` returns the folder's name of a tensor.

        The module is the one that the tensors do not fit, and `part` its name in errors.
        """
        found = []
        if self.missing:
            found.append(f"lacks {some([*map(stored_name, self.missing)])}")
        if self.unknown:
            found.append(f"has {some([*map(stored_name, self.unknown)])}, unknown to {type(module).__name__}")
        for name, got, expected in self.mismatched[:1]:
            found.append(f"has {stored_name(name)} of shape {list(got)}, expected {list(expected)}")
        if found:
            raise does_not_fit(what, " and ".join(found), part)


def load_tensors(folder: Path, wanted: Callable[[str], object] = ALL) -> dict[str, Tensor]:
    """Return the tensors with wanted names that transformers would load.

    If there is an index, each tensor comes from the file that the index names for it.

    Raises:
        ValueError: there are no weights, or a file holds anything but tensors.
    """
    files = {name: file for name, file in tensor_files(folder).items() if wanted(name)}
    tensors: dict[str, Tensor] = {}
    for file in sorted({folder / name for name in files.values()}):
        tensors |= {name: tensor for name, tensor in tensors_of(file, wanted).items() if files.get(name) == file.name}
    return tensors


def tensors_of(file: Path, wanted: Callable[[str], object] = ALL) -> dict[str, Tensor]:
    """Return the tensors of one file with wanted names.

    Raises:
        ValueError: it cannot be read, or holds anything but tensors.
    """
    if file.suffix == ".safetensors":
        with readable(file), safe_open(file, "pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys() if wanted(name)}  # noqa: SIM118
    return {name: tensor for name, tensor in unpickled(file, "cpu").items() if wanted(name)}


def weights_file(folder: Path) -> Path:
    """Return the first of WEIGHTS that exists."""
    for name in WEIGHTS:
        if (folder / name).exists():
            return folder / name
    raise ValueError(f"checkpoint: {folder} has no weights, expected one of {', '.join(WEIGHTS)}")


def weight_map(index: Path) -> dict[str, str]:
    """Return the file, next to the index, that holds each tensor."""
    content = read_json(index)
    files: Any = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict):
        raise ValueError(f"checkpoint: {index} has no weight_map, expected one from tensors to files")
    for name, file in files.items():
        if not isinstance(file, str):
            raise ValueError(f"checkpoint: {index} has {file!r} for {name}, expected the name of a file")
        if Path(file).name != file:
            raise ValueError(f"checkpoint: {index} names {file}, expected files of its own folder")
    return {str(name): str(file) for name, file in files.items()}


def unpickled(file: Path, device: str) -> dict[str, Tensor]:
    """Return the tensors of a `.bin` file by torch's safe unpickler; on "meta" their data is not read."""
    with readable(file):
        tensors: dict[str, Tensor] = torch.load(file, map_location=device, weights_only=True)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"checkpoint: {file} has {name}, a {type(tensor).__name__}, expected tensors alone")
    return tensors


def some(names: list[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more tensors" if len(names) > most else "")


def read_json(file: Path) -> Any:
    with readable(file):
        return json.loads(file.read_text("utf-8"))


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Turn the errors of a library that cannot read a file into a ValueError that names the file."""
    try:
        yield
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"checkpoint: {file} cannot be read, expected a file as its name says ({reason})") from error
