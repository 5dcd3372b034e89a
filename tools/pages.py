"""Writes what follows from the code: docs/api.md, the tables in README.md, and the notebooks beside their scripts.

python tools/pages.py          writes them
python tools/pages.py --check  says which are out of date; exit status 1 if any is
"""

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import jupytext
import nbformat

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "docs" / "measured"

# What a user calls, by module, in the order of use.
PUBLIC = {
    "dsa_jax.loading": ("load_model",),
    "dsa_jax.decode": ("LanguageModel", "generate", "stream", "ImageSpan"),
    "dsa_jax.engine": None,
    "dsa_jax.sampling": ("Sampling",),
    "dsa_jax.numerics": ("Numerics", "numerics"),
    "dsa_jax.inspect": ("inspect_checkpoint", "Inspection"),
    "dsa_jax.demo": ("write_demo_checkpoint",),
    "dsa_jax.encoding": None,
    "dsa_jax.golden": None,
    "dsa_jax.plots": ("layer_plan", "errors", "verdicts"),
    "dsa_jax.weights": None,
    "pallas_kernels": None,
    "pallas_kernels.aot": ("compile_report", "compile_for"),
    "pallas_kernels.bench": ("run", "table", "to_json", "plot"),
}


def api() -> str:
    """The public API as Markdown: signatures and docstrings."""
    parts = ["# Public API\n\nWritten by `make pages` from the docstrings.\n"]
    for name, members in PUBLIC.items():
        module = importlib.import_module(name)
        parts.append(f"\n## {name}\n\n{_text(module)}\n")
        for member in members or module.__all__:
            thing = getattr(module, member)
            if callable(thing):
                parts += _entry(member, thing)
    return "".join(parts)


def _entry(name: str, thing) -> Iterator[str]:
    yield f"\n### `{name}`\n\n```python\n{_signature(name, thing)}\n```\n\n{_text(thing)}\n"
    if inspect.isclass(thing):
        for method, function in vars(thing).items():
            if inspect.isfunction(function) and not method.startswith("_") and function.__doc__:
                yield f"\n#### `{name}.{method}`\n\n```python\n{_signature(method, function)}\n```\n\n{_text(function)}\n"


def _signature(name: str, thing) -> str:
    try:
        signature = inspect.signature(thing)
    except ValueError:
        return name
    parameters = [str(p).partition(":")[0].partition("=")[0].strip() for p in signature.parameters.values()]
    defaults = [p.default for p in signature.parameters.values()]
    shown = [
        text if default is inspect.Parameter.empty else f"{text}={_default(default)}"
        for text, default in zip(parameters, defaults, strict=True)
    ]
    return f"{name}({', '.join(_with_star(signature, shown))})"


def _default(value) -> str:
    return getattr(value, "__name__", None) or repr(value)


def _with_star(signature: inspect.Signature, shown: list[str]) -> Iterator[str]:
    starred = False
    for parameter, text in zip(signature.parameters.values(), shown, strict=True):
        starred |= parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            yield "*"
            starred = True
        yield text


def _text(thing) -> str:
    return inspect.cleandoc(thing.__doc__ or "")


def speed() -> str:
    """Measured rows of docs/measured as a Markdown table: the rows whose file gives them a peer, ours beside it."""
    lines = ["| operation, shape | ours, us | best public kernel, us | times as fast | floor, us |", "|---|---|---|---|---|"]
    sources = set()
    for file in sorted(MEASURED.glob("*.json")):
        measured = json.loads(file.read_text())
        sources.add(f"{measured['card']}, {measured['versions']}, {measured['date']}")
        for row in measured["rows"]:
            if row.get("peer_us") and row.get("headline"):
                ratio = row["peer_us"] / row["us"]
                shape = f"{row['section']}: {row['shape']}"
                lines.append(f"| {shape} | {row['us']:.1f} | {row['peer_us']:.1f} ({row['peer']}) | {ratio:.2f} | {row['floor_us']:.1f} |")
    return "\n".join([*lines, "", *(f"{source}. Cold L2, medians." for source in sorted(sources))])


def marked(text: str, name: str, content: str) -> str:
    """`text` with what stands between the marks of `name` replaced."""
    start, end = f"<!-- {name}: written by make pages -->", f"<!-- end of {name} -->"
    if text.count(start) != 1 or text.count(end) != 1:
        raise ValueError(f"README.md must hold the marks {start!r} and {end!r} once each.")
    return re.sub(f"{re.escape(start)}.*?{re.escape(end)}", lambda _: f"{start}\n{content}\n{end}", text, flags=re.DOTALL)


def notebook(script: Path) -> str:
    """The notebook of a script in colab/, without outputs. Cell ids follow from their order, so that it is stable."""
    book = jupytext.read(script)
    for number, cell in enumerate(book.cells):
        cell["id"] = f"cell-{number}"
    return nbformat.writes(book, version=4) + "\n"


def pages() -> dict[Path, str]:
    """Every written file and what should be in it."""
    from matrix import matrix

    readme = ROOT / "README.md"
    text = marked(readme.read_text(encoding="utf-8"), "matrix", matrix())
    found = {ROOT / "docs" / "api.md": api(), readme: marked(text, "speed", speed())}
    for script in sorted((ROOT / "colab").glob("*.py")):
        found[script.with_suffix(".ipynb")] = notebook(script)
    return found


def main(arguments: list[str]) -> int:
    stale = [(p, t) for p, t in pages().items() if not p.exists() or p.read_text(encoding="utf-8") != t]
    for path, text in stale:
        print(("out of date: " if "--check" in arguments else "wrote ") + str(path.relative_to(ROOT)))
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
    return int("--check" in arguments and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
