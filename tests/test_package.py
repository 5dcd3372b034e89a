"""What a user's machine may lack, and where a checkpoint may be named."""

import subprocess
import sys
import types

import pytest
from tiny import CHECKPOINT

from dsa_jax.cli import main
from dsa_jax.hub import FILES, checkpoint_folder

BINDINGS = ["jaxlib.mosaic.gpu", "jax_cuda12_plugin", "jax_cuda13_plugin"]  # any of them has jax's Mosaic GPU bindings
MODULES = "dsa_jax.cli dsa_jax.loading dsa_jax.decode dsa_jax.inspect dsa_jax.demo pallas_kernels".split()


def python(code: str, absent: list[str]) -> subprocess.CompletedProcess:
    """Runs code in a process of its own where some modules are not installed."""
    code = f"import sys; sys.modules.update(dict.fromkeys({absent!r})); {code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"JAX_PLATFORMS": "cpu"})


def test_import_needs_no_gpu_torch_hub_or_test_packages():
    absent = ["torch", "huggingface_hub", "matplotlib", "pytest", "chex", "beartype", "hypothesis", "jax_plugins", *BINDINGS]
    done = python("import " + ", ".join(MODULES), absent)
    assert done.returncode == 0, done.stderr


def test_without_the_bindings_kernels_name_the_extra():
    done = python("from dsa_jax.cli import main; sys.exit(main(['bench', 'top_k']))", BINDINGS)
    assert done.returncode == 2 and "pip install 'dsa-jax[cuda13]'" in done.stderr and "Traceback" not in done.stderr


def test_a_folder_is_taken_as_it_is():
    assert checkpoint_folder(str(CHECKPOINT)) == CHECKPOINT


def test_a_repository_is_downloaded_with_what_a_checkpoint_needs(monkeypatch, tmp_path):
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    assert checkpoint_folder("owner/model-1.0") == tmp_path
    assert asked == [("owner/model-1.0", FILES)]


@pytest.mark.parametrize("name", ["no/such/folder", "nowhere", "./a/b/c"])
def test_what_is_neither_is_refused(name, capsys):
    assert main(["inspect", name]) == 2
    assert f"{name} is not a folder" in capsys.readouterr().err


def test_without_the_hub_package_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["generate", "owner/model", "--tokens", "5"]) == 2
    assert 'pip install "dsa-jax[hub]"' in capsys.readouterr().err


def test_the_package_is_a_program():
    done = subprocess.run([sys.executable, "-m", "dsa_jax", "inspect", "no-such-folder"], capture_output=True, text=True)
    assert done.returncode and "dsa-jax: " in done.stderr and "no-such-folder" in done.stderr
