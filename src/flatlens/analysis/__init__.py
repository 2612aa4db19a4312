"""Analyse tables of records: select runs, summarise curves, test a claim on them."""
