"""Redraw the paper: recipes, claims, and the command that trains, draws and judges."""
