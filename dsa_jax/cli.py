"""The command line: demo, generate, inspect, numerics; compile-report and bench for the kernels."""

import argparse
import json
import logging
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from dsa_jax.hub import checkpoint_folder

REFUSED = 2  # exit status where the request itself cannot be met


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status. Problems of the caller's making are one sentence on stderr."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for chatty in ("jax", "absl"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("jax").propagate = False  # it has a handler of its own
    logging.getLogger("jax._src.xla_bridge").addFilter(_without_traceback)
    try:
        if hasattr(arguments, "checkpoint"):
            arguments.checkpoint = checkpoint_folder(arguments.checkpoint)
        return arguments.run(arguments)
    except (ValueError, NotImplementedError, OSError) as problem:
        print(f"dsa-jax: {problem}", file=sys.stderr)
        return REFUSED
    except RuntimeError as problem:
        if type(problem) is not RuntimeError:  # jax's own errors are subclasses, and no sentences
            raise
        print(f"dsa-jax: {problem}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return 130


def _without_traceback(record: logging.LogRecord) -> bool:
    """A GPU plugin that is installed where it cannot start is worth a line, not a traceback: jax goes on without it."""
    if record.exc_info and "plugin configuration error" in str(record.msg):
        record.msg = f"A GPU plugin of jax is installed but cannot start here: {record.exc_info[1]}"
        record.args = record.exc_info = None
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dsa-jax", description="DeepSeek's sparse attention in JAX.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    demo = command("demo", _demo, "Write a small random checkpoint, load it and generate from it.")
    demo.add_argument("--family", choices=("v41", "v4", "v32"), default="v41", help="which model's format (default: v41)")
    demo.add_argument("--directory", type=Path, help="keep the checkpoint here (default: a temporary folder)")
    demo.add_argument("--max-new-tokens", type=int, default=48)

    generate = command("generate", _generate, "Load a checkpoint and write tokens.")
    generate.add_argument("checkpoint", help="folder, or hub repository owner/name")
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text; the begin-of-sequence token is put in front")
    prompt.add_argument("--chat", help="a user's message, put into the family's chat format")
    prompt.add_argument("--tokens", help="token ids, separated by commas, taken as they are")
    generate.add_argument("--thinking", action="store_true", help="with --chat: let the model reason first")
    generate.add_argument("--max-new-tokens", type=int, default=64)
    _mode(generate)
    _implementation(generate)
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--top-k", type=int, default=0, help="0 keeps all tokens")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--stop", type=int, action="append", help="stop token id (default: end of sequence); repeatable")
    generate.add_argument("--tp", type=int, default=1, help="devices that heads, vocabulary and experts are divided over")
    generate.add_argument("--cp", type=int, default=1, help="devices that the caches are divided over, by context")
    generate.add_argument("--ep", type=int, default=1, help="further division of the experts: tp x cp x ep devices together")
    generate.add_argument(
        "--engram-tables", choices=("device", "host"), default="device", help="where the Engram tables of V4.1 are kept"
    )
    generate.add_argument("--every", type=int, default=8, help="decode steps in one compiled call")

    inspect = command("inspect", _inspect, "What a checkpoint holds and needs, from its headers and config alone.")
    inspect.add_argument("checkpoint", help="folder, or hub repository owner/name")
    inspect.add_argument("--context", type=int, help="tokens a request may hold (default: 131072, or what the config allows)")
    inspect.add_argument("--batch", type=int, default=1, help="requests at once")
    inspect.add_argument("--devices", type=int, help="plan what lies where on so many devices, and suggest a mesh")
    inspect.add_argument("--device-memory", type=float, default=80, help="GiB of one device that may be used (default: 80)")
    inspect.add_argument("--json", type=Path, help="write the report here too")

    numerics = command("numerics", _numerics, "Compare a model with a golden file of DeepSeek's own code.")
    numerics.add_argument("checkpoint", help="folder, or hub repository owner/name")
    numerics.add_argument("golden", type=Path)
    numerics.add_argument("--mode", choices=("f32", "f32q", "bf16"), help="default: by the file's name")
    _implementation(numerics)
    numerics.add_argument("--json", type=Path, help="write every tensor's verdict here")
    numerics.add_argument("--plot", type=Path, help="draw every tensor against its tolerance into this image file")

    compile_report = command("compile-report", _compile_report, "Compile every kernel for a chip, on any machine.")
    compile_report.add_argument("--target", choices=("h200", "b200"), action="append", help="default: both; repeatable")
    compile_report.add_argument("--operation", help="only the kernels of this operation")
    compile_report.add_argument("--json", type=Path, help="write the report here too")

    command("doctor", _doctor, "What is installed here, which kernels run, and whether each computes right.")

    bench = command("bench", _bench, "Time an operation's kernels on the GPU at hand, at their named shapes.")
    bench.add_argument("operation", help="such as indexer_logits or top_k; or model, for whole steps of a model by part")
    bench.add_argument("--shape", action="append", help="only this shape; repeatable")
    bench.add_argument("--no-xla", action="store_true", help="do not time the same shapes through XLA, which takes longest")
    bench.add_argument("--config", type=Path, help="model: folder with the config.json whose widths are taken")
    bench.add_argument("--batch", type=int, action="append", help="model: requests of a decode step; repeatable (default: 1, 32)")
    bench.add_argument("--context", type=int, action="append", help="model: tokens of context; repeatable (default: 16384, 131072)")
    bench.add_argument("--chunk", type=int, default=2048, help="model: tokens of a prefill step")
    bench.add_argument("--experts", type=int, default=32, help="model: routed experts kept")
    bench.add_argument("--mode", choices=("f32", "f32q", "bf16"), default="bf16", help="model: numerics mode")
    bench.add_argument("--json", type=Path, help="write the rows here too")
    bench.add_argument("--plot", type=Path, help="draw times and floors into this image file")
    return parser


def _mode(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mode", choices=("f32", "f32q", "bf16"), default="bf16", help="numerics mode (default: bf16)")


def _implementation(parser: argparse.ArgumentParser) -> None:
    names = ("reference", "sm90", "sm100")
    parser.add_argument("--implementation", choices=names, help="of every operation (default: the GPU's kernels where they carry a call)")


def _demo(arguments: argparse.Namespace) -> int:
    from dsa_jax.demo import write_demo_checkpoint
    from dsa_jax.loading import load_model
    from dsa_jax.sampling import Sampling

    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.directory or Path(scratch) / "demo-checkpoint"
        write_demo_checkpoint(directory, family=arguments.family)
        print(f"A random checkpoint in the official format: {directory}\n")
        _print_report(directory, context=4096, batch=1)
        prompt = "The index finds what attention reads."
        print(f"\nPrompt: {prompt!r}. The weights are random, so what follows is noise, but the same noise every time.\n")
        lm = load_model(directory)
        return _write_tokens(lm, directory, _encode(directory, prompt), arguments.max_new_tokens, Sampling.of(1))


def _generate(arguments: argparse.Namespace) -> int:
    from dsa_jax.loading import load_model
    from dsa_jax.sampling import Sampling

    if arguments.thinking and arguments.chat is None:
        raise ValueError("--thinking belongs to --chat: a plain prompt has no place for it.")
    if arguments.chat is not None:
        tokens = _encode_chat(arguments.checkpoint, arguments.chat, arguments.thinking)
    elif arguments.prompt is not None:
        tokens = _encode(arguments.checkpoint, arguments.prompt)
    else:
        try:
            tokens = [int(t) for t in arguments.tokens.split(",")]
        except ValueError:
            raise ValueError(f"--tokens {arguments.tokens!r} is not a list of token ids such as 0,5,17.") from None
    sampling = Sampling.of(1, **{name: getattr(arguments, name) for name in ("temperature", "top_p", "top_k", "seed")})
    options = {"stop_ids": arguments.stop, "every": arguments.every}
    mesh = _mesh(tp=arguments.tp, cp=arguments.cp, ep=arguments.ep)
    lm = load_model(
        arguments.checkpoint, arguments.mode, implementation=arguments.implementation, mesh=mesh,
        engram_tables=arguments.engram_tables,
    )  # fmt: skip
    return _write_tokens(lm, arguments.checkpoint, tokens, arguments.max_new_tokens, sampling, **options)


def _mesh(**sizes: int):
    """The first devices as a mesh, or None where one is enough."""
    if set(sizes.values()) == {1}:
        return None
    import jax

    from dsa_jax import sharding

    return sharding.make_mesh(jax.devices()[: max(math.prod(sizes.values()), 1)], **sizes)


def _write_tokens(lm, directory: Path, tokens: list[int], max_new_tokens: int, sampling, **options) -> int:
    from dsa_jax.decode import stream

    text = _TextStream(directory)
    started, first, count = time.perf_counter(), None, 0
    with tqdm(total=len(tokens), desc="compile and prefill", unit="token", leave=False) as waiting:
        for (new,) in stream(lm, [tokens], max_new_tokens, sampling=sampling, **options):
            waiting.close()
            print(text.add(new), end="", flush=True)
            count += len(new)
            if first is None:
                first, counted_first = time.perf_counter(), count
    ended = time.perf_counter()
    print(text.rest())
    later, seconds = count - counted_first, ended - first
    rate = f"; then {later} tokens at {later / seconds:.1f} tokens/s" if later and seconds else ""
    print(
        f"\n{len(tokens)} prompt tokens; {counted_first} tokens after {first - started:.1f} s, compilation included{rate}."
    )
    return 0


def _tokenizer(directory: Path):
    from tokenizers import Tokenizer

    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{directory} has no tokenizer.json. Download it, or give token ids with --tokens.")
    return Tokenizer.from_file(str(path))


def _encode(directory: Path, prompt: str) -> list[int]:
    from dsa_jax.config import load_config

    begin = load_config(directory).bos_token_id
    ids = _tokenizer(directory).encode(prompt, add_special_tokens=False).ids
    return ids if ids[:1] == [begin] else [begin, *ids]


def _encode_chat(directory: Path, message: str, thinking: bool) -> list[int]:
    from dsa_jax.config import load_config
    from dsa_jax.encoding import encode_messages

    load_config(directory)
    model_type = json.loads((directory / "config.json").read_text(encoding="utf-8"))["model_type"]
    text = encode_messages(model_type, [{"role": "user", "content": message}], thinking=thinking)
    return _tokenizer(directory).encode(text, add_special_tokens=False).ids


class _TextStream:
    """Token ids -> text, piece by piece; a character whose bytes are not all there yet is held back."""

    def __init__(self, directory: Path):
        self.tokenizer, self.ids, self.written = _tokenizer(directory), [], 0

    def add(self, ids: list[int]) -> str:
        self.ids += ids
        return self._take(self.tokenizer.decode(self.ids).rstrip("\ufffd"))

    def rest(self) -> str:
        return self._take(self.tokenizer.decode(self.ids))

    def _take(self, text: str) -> str:
        new, self.written = text[self.written :], max(self.written, len(text))
        return new


def _inspect(arguments: argparse.Namespace) -> int:
    from dsa_jax.config import load_config

    context = arguments.context or min(131072, load_config(arguments.checkpoint).max_position_embeddings)
    options = {"devices": arguments.devices, "device_memory": int(arguments.device_memory * 2**30)}
    report = _print_report(arguments.checkpoint, context, arguments.batch, **options)
    if arguments.json:
        arguments.json.write_text(json.dumps(report.as_dict(), indent=1))
    return 0 if report.device_plan is None or report.device_plan.fits else 1


def _print_report(directory: Path, context: int, batch: int, **options):
    from dsa_jax.inspect import inspect_checkpoint

    report = inspect_checkpoint(directory, context=context, batch=batch, progress=True, **options)
    print("\n".join(report.lines()))
    return report


def _numerics(arguments: argparse.Namespace) -> int:
    from dsa_jax import golden
    from dsa_jax.loading import load_model

    cases = golden.read_cases(arguments.golden)
    mode = arguments.mode or golden.mode_of_file(arguments.golden)
    lm = load_model(arguments.checkpoint, mode, implementation=arguments.implementation)
    rows = []
    for case in cases:
        with tqdm(total=len(case.fed), desc=case.prefix.rstrip(".") or "compare", unit="step") as bar:
            for progress, ours in golden.run_case(lm, case):
                bar.set_postfix_str(progress)
                bar.update(not ours)
        rows += golden.compare_case(case, ours, mode)
    print(f"{arguments.golden.name} in mode {mode}")
    print("\n".join(golden.table(rows)))
    failed = sum(row.ok is False for row in rows)
    judged = sum(row.ok is not None for row in rows)
    print(f"{judged - failed} of {judged} judged tensors are within the tolerances ({len(rows)} compared).")
    if arguments.json:
        result = {"golden": arguments.golden.name, "mode": mode, "ok": not failed, "tensors": [r.as_dict() for r in rows]}
        arguments.json.write_text(json.dumps(result, indent=1))
    if arguments.plot:
        from dsa_jax import plots

        plots.verdicts(rows, f"{arguments.golden.name} in mode {mode}").savefig(arguments.plot, dpi=150)
    return 1 if failed else 0


def _compile_report(arguments: argparse.Namespace) -> int:
    from pallas_kernels import aot

    report = aot.compile_report(tuple(arguments.target or aot.TARGETS), arguments.operation, progress=True)
    print(report.text())
    if arguments.json:
        arguments.json.write_text(report.json())
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from dsa_jax import doctor

    problems = 0
    for finding in tqdm(doctor.findings(), desc="doctor", unit="check", leave=False, disable=None):
        tqdm.write(finding.line())
        problems += finding.ok is False
    return 1 if problems else 0


def _bench(arguments: argparse.Namespace) -> int:
    if arguments.operation == "model":
        return _bench_model(arguments)
    from pallas_kernels import bench

    rows = bench.run(
        arguments.operation,
        shapes=arguments.shape,
        xla=not arguments.no_xla,
        report=lambda row: tqdm.write(bench.table([row]).splitlines()[-1]),
        progress=True,
    )
    print(bench.table(rows))
    if arguments.json:
        arguments.json.write_text(bench.to_json(rows))
    if arguments.plot:
        bench.plot(rows, str(arguments.plot))
    return 0


def _bench_model(arguments: argparse.Namespace) -> int:
    from dsa_jax import bench_model
    from dsa_jax.config import load_config
    from dsa_jax.numerics import numerics

    if arguments.config is None:
        raise ValueError("bench model needs --config FOLDER, a folder with the config.json whose widths are taken.")
    rows = bench_model.run(
        load_config(arguments.config),
        numerics(arguments.mode),
        batches=arguments.batch or (1, 32),
        contexts=arguments.context or (16384, 131072),
        chunk=arguments.chunk,
        experts=arguments.experts,
        reference=not arguments.no_xla,
        report=lambda row: tqdm.write(bench_model.table([row]).splitlines()[-1]),
        progress=True,
    )
    print(bench_model.table(rows))
    if arguments.json:
        arguments.json.write_text(bench_model.to_json(rows))
    if arguments.plot:
        bench_model.plot(rows, str(arguments.plot))
    return 0
