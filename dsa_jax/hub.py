"""A checkpoint named on the command line: a folder, or a repository of the Hugging Face Hub."""

import re
from pathlib import Path

FILES = ["*.safetensors", "*.safetensors.index.json", "config.json", "tokenizer.json", "tokenizer_config.json"]


def checkpoint_folder(name: str) -> Path:
    """The folder of the checkpoint `name`: a local folder, or, for "owner/name", the downloaded (or cached) repository.

    Downloads go through huggingface_hub, resume where they stopped, and fetch weights, configs and tokenizer only.
    ValueError: neither a folder nor the name of a repository, or huggingface_hub is not installed.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or folder.parent.is_dir():
        raise ValueError(f"{name} is not a folder. Give the folder of a checkpoint, or the name of a hub repository (owner/name).")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(
            f"{name} is not a folder, and to download it as a hub repository huggingface_hub is needed: "
            'pip install "dsa-jax[hub]".'
        ) from None
    return Path(snapshot_download(name, allow_patterns=FILES))
