"""The plan tables of the official configs, as `dsa-jax inspect` prints them, against tables made from the specification."""

import pytest
from conftest import GOLDEN
from official_v4 import official_v4_config
from official_v41 import official_config
from test_v32_config import RELEASED

from dsa_jax.config import V41Config
from dsa_jax.config_v4 import V4Config
from dsa_jax.config_v32 import V32Config
from dsa_jax.inspect import plan_table

CONFIGS = {
    "v41-flash": lambda: V41Config.from_dict(official_config()),
    "v4-flash": lambda: V4Config.from_dict(official_v4_config("flash")),
    "v4-flash-0731": lambda: V4Config.from_dict(official_v4_config("flash-0731")),
    "v4-pro": lambda: V4Config.from_dict(official_v4_config("pro")),
    "v32": lambda: V32Config.from_dict(RELEASED),
}


def test_every_golden_table_has_its_config():
    assert {path.stem for path in (GOLDEN / "plans").iterdir()} == set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_ac_63_plan_table(name):
    assert plan_table(CONFIGS[name]()) == (GOLDEN / "plans" / f"{name}.txt").read_text().splitlines()
