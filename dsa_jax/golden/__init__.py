"""Golden files: read, run, and compare within the tolerance table."""

from dsa_jax.golden.cases import Case, mode_of_file, read_cases
from dsa_jax.golden.compare import compare_case, table
from dsa_jax.golden.run import run_case

__all__ = ["Case", "compare_case", "mode_of_file", "read_cases", "run_case", "table"]
