"""README, pages and notebooks: what is written from the code is up to date, and what a reader is told to run does run."""

import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import nbclient
import nbformat
import pytest

from dsa_jax import cli
from dsa_jax.demo import write_demo_checkpoint

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """That of the family which compiles fastest."""
    folder = tmp_path_factory.mktemp("documents") / "checkpoint"
    write_demo_checkpoint(folder, family="v32")
    return folder


@pytest.mark.slow
def test_pages_are_what_the_code_says():
    run = subprocess.run(
        [sys.executable, ROOT / "tools" / "pages.py", "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not missing


def test_there_are_notebooks_and_each_installs_from_this_repository():
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    place = address.removeprefix("https://github.com/")
    assert len(NOTEBOOKS) == 5
    for path in NOTEBOOKS:
        text, install, *_ = (cell.source for cell in nbformat.read(path, as_version=4).cells)
        assert f"colab.research.google.com/github/{place}/blob/main/colab/{path.name}" in text
        assert f"git+{address}" in install


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=900, resources={"metadata": {"path": str(path.parent)}}).execute()
    pictures = [
        output
        for cell in book.cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", {})
    ]
    assert pictures


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_readme_commands_run(checkpoint, capsys):
    lines = [line.split("#")[0].strip() for block in _blocks("") for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("dsa-jax ")]
    assert len(commands) >= 3
    golden = ROOT / "tests" / "golden" / "v41"
    for command in commands:
        where = golden / "checkpoint" if "GOLDEN" in command else checkpoint
        filled = command.replace("CHECKPOINT", str(where)).replace("GOLDEN.safetensors", str(golden / "short_f32.safetensors"))
        assert cli.main(shlex.split(filled)[1:]) == 0, capsys.readouterr().err
    assert set(lines) - set(commands) <= {"make demo", ""}


@pytest.mark.slow
def test_wheel_holds_the_packages(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT]
    assert subprocess.run(build, capture_output=True).returncode == 0
    (wheel,) = tmp_path.glob("dsa_jax-*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    here = {str(path.relative_to(ROOT)) for package in ("dsa_jax", "pallas_kernels") for path in (ROOT / package).rglob("*.py")}
    assert inside == here


@pytest.mark.slow
def test_make_demo():
    run = subprocess.run(["make", "demo"], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    for word in ("reindex", "reuse", "candidates", "devices", "prompt tokens"):
        assert word in run.stdout


@pytest.mark.slow
def test_readme_python_runs(checkpoint, capsys):
    (code,) = _blocks("python")
    exec(compile(code.replace("path/to/checkpoint", str(checkpoint)), "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()
