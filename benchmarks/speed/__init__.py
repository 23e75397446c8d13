"""Measures time and memory: ``python -m benchmarks.speed.NAME`` runs one program, and writes to ``benchmarks/results``."""
