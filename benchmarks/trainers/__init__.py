"""Do the trainers that people use keep the laws? Each as its users write it, judged by ``ps.testing.run_laws``.

python -m benchmarks.trainers
"""
