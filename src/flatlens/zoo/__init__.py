"""Measure many vision models of timm: the points of Figure 3."""
