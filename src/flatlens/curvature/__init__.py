"""Quantities that need passes of their own: Hessian traces, relative flatness, Eqs. 36 to 47."""
