"""Do the trainers that people use keep the laws? Each as its users write it, judged by ``ps.testing.judge``.

python -m benchmarks.conformance
"""
