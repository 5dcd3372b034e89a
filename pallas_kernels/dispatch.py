"""Which implementation of an operation runs.

Every operation is a folder with a public function in ``__init__.py`` and one module per implementation:
``reference`` (plain JAX, everywhere), ``sm90`` (Hopper), ``sm100`` (Blackwell). A module that is absent, or that
raises NotImplementedError, does not carry the call.

``implementation`` names one: "reference", "sm90", "sm100", or "interpret_sm90" / "interpret_sm100" (that kernel in
the GPU interpreter, on any machine). A named implementation never falls back. None takes the one named by the
innermost `preferred`, else the kernel of the GPU at hand, which falls back to the reference with one log line (a
warning) per operation and reason; a kernel that runs is named once, too (info). A kernel module may hold back calls
that its kernels carry but that were never run on the chip: its ``unproven(function, arguments)`` gives the reason, or
None. Such a call runs on the kernel where it is named.
"""

import contextlib
import contextvars
import functools
import importlib
import importlib.util
import logging

import jax

from pallas_kernels import platform

IMPLEMENTATIONS = ("reference", "sm90", "sm100", "interpret_sm90", "interpret_sm100")

log = logging.getLogger("pallas_kernels")
_preferred: contextvars.ContextVar[str | None] = contextvars.ContextVar("implementation", default=None)


@contextlib.contextmanager
def preferred(implementation: str | None):
    """Names the implementation of every call inside it (traced inside it, under jit) that names none itself."""
    _check_name("any operation", implementation)
    token = _preferred.set(implementation)
    try:
        yield
    finally:
        _preferred.reset(token)


def _check_name(operation: str, implementation: str | None) -> None:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} of {operation} is not known. Allowed: None, "
            f"{', '.join(IMPLEMENTATIONS)}."
        )


def named(implementation: str | None) -> str | None:
    """`implementation`, or the one of the innermost `preferred` where it is None."""
    return _preferred.get() if implementation is None else implementation


def call(package: str, function: str, implementation: str | None, *args, **kwargs):
    """Runs `function` of the operation in `package` (the operation's ``__name__``) by `implementation`.

    Raises ValueError for an unknown name and NotImplementedError when a named implementation does not carry the call.
    What it computes stands under the operation's name in a profile.
    """
    with jax.named_scope(package.rpartition(".")[2]):
        return _call(package, function, implementation, *args, **kwargs)


def _call(package: str, function: str, implementation: str | None, *args, **kwargs):
    operation = package.rpartition(".")[2]
    implementation = named(implementation)
    if implementation is None:
        name = platform.kernel_name()
        if name is not None:
            try:
                kernel = _load(package, name, function)
                _refuse_unproven(kernel, function, args)
                result = kernel(*args, **kwargs)
                _say_once(logging.INFO, f"{operation}.{function}: the {name} kernel runs")
                return result
            except NotImplementedError as reason:
                _say_once(logging.WARNING, f"{operation}.{function}: the reference runs instead of {name}: {reason}")
        return _load(package, "reference", function)(*args, **kwargs)
    _check_name(operation, implementation)
    if implementation.startswith("interpret_"):
        with platform.interpreted():
            result = _load(package, implementation.removeprefix("interpret_"), function)(*args, **kwargs)
            return jax.block_until_ready(result)  # a race is raised here, and not where the result is used
    platform.require(implementation)
    return _load(package, implementation, function)(*args, **kwargs)


def runs_kernel(package: str, function: str, *args, **kwargs) -> bool:
    """Whether `call` with these arguments and no implementation runs a kernel: for callers that prepare its arguments in
    another way for the reference. Arrays, or `jax.ShapeDtypeStruct` in their place; nothing is computed."""
    chosen = named(None)
    name = platform.kernel_name() if chosen is None else chosen.removeprefix("interpret_")
    if name is None or name == "reference":
        return False
    try:
        kernel = _load(package, name, function)
        if chosen is None:
            _refuse_unproven(kernel, function, args)
        jax.eval_shape(functools.partial(kernel, **kwargs), *args)
    except NotImplementedError:
        return False
    return True


def _refuse_unproven(kernel, function: str, args) -> None:
    """Raises NotImplementedError where the kernel's module holds this call back."""
    unproven = getattr(importlib.import_module(kernel.__module__), "unproven", None)
    reason = unproven(function, args) if unproven is not None else None
    if reason is not None:
        raise NotImplementedError(reason)


def carries(package: str, implementation: str) -> bool:
    """Whether the operation in `package` has a module for `implementation`."""
    return importlib.util.find_spec(f"{package}.{implementation.removeprefix('interpret_')}") is not None


def _load(package: str, name: str, function: str):
    operation = package.rpartition(".")[2]
    if not carries(package, name):
        raise NotImplementedError(f"{operation} has no {name} kernel yet; use implementation='reference'.")
    found = getattr(importlib.import_module(f"{package}.{name}"), function, None)
    if found is None:
        raise NotImplementedError(f"{operation} has no {name} kernel for {function}; use implementation='reference'.")
    return found


@functools.cache
def _say_once(level: int, line: str) -> None:
    log.log(level, line)
