"""`python -m dsa_jax`: the command line, also where the package is not installed."""

import sys

from dsa_jax.cli import main

sys.exit(main())
