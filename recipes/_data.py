"""Where a recipe's data comes from: your own path, or data generated once on this machine. No network is needed.

    recipe.data=null            generated once under $XDG_CACHE_HOME/fastloop/data (~/.cache without it) by ``_made.py``
    recipe.data=photos/         a folder per class, or train/ and val/ (or test/) that hold a folder per class
    recipe.data=photos.tar      a tar of such a folder, unpacked once into that same place
    recipe.data=book.txt        for the language model: a text, one token per byte

Everything in the cache is created in a temporary folder and then moved into place as a whole. So an interrupted run
leaves nothing half done, and of two processes that create the same data at once, one wins and both go on.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from fastloop.errors import ConfigError

from . import _made

PICTURES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # what ImageFolder reads
SIZES = ("default", "tiny")
VAL_EVERY = 10
"""Without a given split, every tenth picture is kept for validation."""


def check_size(size: str) -> None:
    """Raise ConfigError unless the recipe has this size."""
    if size not in SIZES:
        raise ConfigError(
            got=f"recipe.size={size!r}",
            why=f"the sizes are {' and '.join(SIZES)}",
            do="write size: tiny (a minute or two on two CPU cores) or size: default",
            key="recipe.size",
        )


def require_torchvision() -> None:
    """Raise ConfigError, with the fix, where the optional torchvision is not installed."""
    if importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            got="torchvision is not installed",
            why="this recipe reads pictures with it",
            do="pip install torchvision (part of lightning-fastloop[recipes])",
        )


def check_path(data: str | None) -> Path | None:
    """The path that ``recipe.data`` names, None for none; raise ConfigError where nothing is there."""
    if data is None:
        return None
    path = Path(data).expanduser().absolute()
    if not path.exists():
        raise _unusable(data, f"there is no file or folder {path}")
    return path


def cache_folder() -> Path:
    """The folder for generated and unpacked data; it may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastloop" / "data"


def publish(name: str, make: Callable[[Path], None]) -> Path:
    """Return the cached folder ``name``; if it does not exist yet, ``make`` fills it first.

    Raises:
        ConfigError: the cache folder cannot be written.
    """
    place = cache_folder() / name
    if place.is_dir():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=place.parent))
    except OSError as error:
        do = "set XDG_CACHE_HOME to a folder you can write to"
        raise ConfigError(got=f"cache folder {place.parent}", why=str(error), do=do) from error
    try:
        make(draft)
        draft.replace(place)
    except OSError:
        if not place.is_dir():  # else another process was first: its folder holds the same files
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return place


def picture_folder(data: str | None, name: str, make: Callable[[Path], None]) -> Path:
    """The folder of pictures: the generated one called ``name``, the user's own, or the user's tar unpacked."""
    path = check_path(data)
    if path is None:
        return publish(name, make)
    return path if path.is_dir() else publish(_cache_name(path), lambda folder: _unpack(path, folder))


def picture_sets(root: Path, for_train: Any, for_val: Any, *, outputs: int) -> tuple[Dataset[Any], Dataset[Any]]:
    """The training and the validation pictures under ``root``, each with its own transform.

    Raises:
        ConfigError: the folder is not laid out as a folder per class, holds no pictures, or more classes than the
            recipe's network has outputs.
    """
    from torchvision.datasets import ImageFolder

    top = _without_wrapping(root)
    val_folder = next((top / name for name in ("val", "test") if (top / name).is_dir()), None)
    try:
        train_folder = top / "train" if (top / "train").is_dir() else top
        split = train_folder != top and val_folder is not None
        train = ImageFolder(str(train_folder), for_train)
        val = ImageFolder(str(val_folder if split else train_folder), for_val)
    except FileNotFoundError as error:
        looked_for = f"looked in {top} for train/ with val/ or test/, then for a folder per class"
        raise _unusable(str(root), f"{looked_for}: {error}") from error
    if len(train.classes) > outputs:
        raise _unusable(
            str(root), f"it has {len(train.classes)} classes, but the recipe's network has {outputs} outputs"
        )
    if split:
        return train, val
    if len(train) < VAL_EVERY:
        raise _unusable(str(root), f"{len(train)} pictures are too few to keep every {VAL_EVERY}th for validation")
    kept = range(0, len(train), VAL_EVERY)
    return Subset(train, sorted(set(range(len(train))) - set(kept))), Subset(val, kept)


def cifar10_download() -> Path:
    """The folder that torchvision's CIFAR10 reads, fetched on the first call.

    Raises:
        ConfigError: it could not be downloaded, for instance without a network; after at most 20 s without a byte.
    """
    from torchvision.datasets import CIFAR10

    patience_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(20)  # torchvision sets none, and would wait forever behind a silent firewall
    try:
        return publish("cifar10-download", lambda folder: CIFAR10(str(folder), download=True))
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            got="recipe.data=download",
            why=f"CIFAR-10 could not be downloaded: {error}",
            do="check the network, give a folder or a tar, or write data: null for generated pictures",
            key="recipe.data",
        ) from error
    finally:
        socket.setdefaulttimeout(patience_s)


class Windows(Dataset[Any]):
    """Windows of a token file, and the same shifted by one token, each [T]; one starts every ``stride`` tokens."""

    def __init__(self, file: Path, context: int, stride: int) -> None:
        self.tokens = np.memmap(file, dtype=np.uint16, mode="r")
        self.context, self.stride = context, stride

    def __len__(self) -> int:
        return (len(self.tokens) - self.context - 1) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.stride
        window = torch.from_numpy(self.tokens[start : start + self.context + 1].astype(np.int64))
        return window[:-1], window[1:]


def token_sets(data: str | None, context: int) -> tuple[Windows, Windows]:
    """A text as windows of ``context`` tokens, one token per byte; its last tenth is for validation.

    The windows for training overlap by three quarters, so that a megabyte of text lasts for some time.

    Raises:
        ConfigError: ``data`` is not a file, or too short a text.
    """
    path = check_path(data)
    if path is None:
        folder = publish(f"text-{_made.VERSION}", lambda draft: _write_tokens(_made.text(), draft))
    elif not path.is_file():
        raise _unusable(str(data), "this recipe reads one text file, but this is a folder")
    elif (size := path.stat().st_size) < (least := 20 * context):
        raise _unusable(str(data), f"the text has {size} bytes, but windows of {context} tokens need {least}")
    else:
        folder = publish(_cache_name(path), lambda draft: _write_tokens(path.read_bytes(), draft))
    return Windows(folder / "train.bin", context, context // 4), Windows(folder / "val.bin", context, context)


def _write_tokens(text: bytes, folder: Path) -> None:
    tokens = np.frombuffer(text, np.uint8).astype(np.uint16)
    cut = len(tokens) * 9 // 10
    tokens[:cut].tofile(folder / "train.bin")
    tokens[cut:].tofile(folder / "val.bin")


def _unpack(tar: Path, folder: Path) -> None:
    try:
        with tarfile.open(tar) as archive:
            if not any(member.isfile() and member.name.lower().endswith(PICTURES) for member in archive):
                raise _unusable(str(tar), f"the tar contains no pictures ({' '.join(PICTURES)})")
            archive.extractall(folder, filter="data")  # refuses members that would land outside the folder
    except (tarfile.TarError, EOFError) as error:
        raise _unusable(str(tar), f"it cannot be unpacked as a tar: {error}") from error


def _cache_name(path: Path) -> str:
    """A name that changes when the file does."""
    return f"{path.stem}-{path.stat().st_size}-{path.stat().st_mtime_ns}"


def _without_wrapping(root: Path) -> Path:
    """Step into a lone folder of folders, which is how a tar of ``photos/`` unpacks."""
    while len(inner := _folders(root)) == 1 and _folders(inner[0]):
        root = inner[0]
    return root


def _folders(root: Path) -> list[Path]:
    return [entry for entry in sorted(root.iterdir()) if entry.is_dir()]


def _unusable(data: str, why: str) -> ConfigError:
    return ConfigError(
        got=f"recipe.data={data}",
        why=why,
        do="give a folder, tar or text file (the recipe's YAML says which), or null for generated data",
        key="recipe.data",
    )
