"""Mutants that survive, and why each may."""

KNOWN: dict[str, str] = {}
