"""Weights: header scan -> plan -> check everything -> stream."""

from dsa_jax.weights.exponents import as_exponents
from dsa_jax.weights.load import load, mapped
from dsa_jax.weights.plan import LoadPlan, PlanEntry, make_plan

__all__ = ["LoadPlan", "PlanEntry", "as_exponents", "load", "make_plan", "mapped"]
