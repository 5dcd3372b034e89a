"""The plan tables of the official configs, as `dsa-jax inspect` prints them, against tables made from the specification."""

import re
from pathlib import Path

import pytest
from conftest import GOLDEN
from official_v4 import official_v4_config
from official_v41 import official_config
from test_v32_config import RELEASED

import dsa_jax.layers
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


def test_no_layer_asks_which_family_it_belongs_to():
    """What differs between families is in the roles that a plan gives, and in which layers a model is made of."""
    for path in Path(dsa_jax.layers.__file__).parent.glob("*.py"):
        found = re.search(r"model_type|isinstance\((self\.)?config|type\((self\.)?config|deepseek_v\d+[\"\']", path.read_text())
        assert found is None, f"{path.name}: {found}"
