"""Whole models: embed, layers by plan, head."""
