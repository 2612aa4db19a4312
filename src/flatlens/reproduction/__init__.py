"""Reproduce the paper: recipes, claims, and the functions that train, draw and judge."""
