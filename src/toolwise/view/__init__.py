"""Plots, tables and an HTML report of a run, built from its folder."""
