"""Who made a capture: the model's identity and the environment it ran in."""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch

import pwbench
from pwbench.device import commit

_FULL_HASH_BYTES = 16 << 30


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Versions and device that a capture was made with; JSON types only."""
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    return {
        "pwbench": pwbench.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device.type,
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "cuda": torch.version.cuda if on_gpu else None,
    }


def utc_now() -> str:
    """The time in UTC to the second, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def model_facts(directory: Path, model: torch.nn.Module) -> dict[str, Any]:
    """Name, configuration and weights hash of a transformers model directory."""
    config = json.loads((directory / "config.json").read_text())
    return {
        "name": directory.resolve().name,
        "architecture": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "config": config,
        **weights_hash(directory),
    }


def weights_hash(directory: Path) -> dict[str, str]:
    """``weights_sha256`` over all weight files in name order.

    Beyond 16 GiB only the files' names, sizes and first MiB (the header with every tensor's name and
    shape) are hashed, and the entry is called ``weights_headers_sha256`` instead.
    """
    files = sorted(directory.glob("*.safetensors"))
    whole = sum(f.stat().st_size for f in files) <= _FULL_HASH_BYTES
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as stream:
            if whole:
                while block := stream.read(1 << 20):
                    digest.update(block)
            else:
                digest.update(stream.read(1 << 20))
    return {"weights_sha256" if whole else "weights_headers_sha256": digest.hexdigest()}
