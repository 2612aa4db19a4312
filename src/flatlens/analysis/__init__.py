"""Analyse tables of records: select runs, reduce curves to numbers, test claims on them."""
