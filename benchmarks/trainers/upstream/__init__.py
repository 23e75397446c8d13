"""Pages for maintainers, one for each bug, with programs that are run.

python -m benchmarks.trainers.upstream
"""
