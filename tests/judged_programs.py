"""Holds programs of trainers, as users of the kit write them to a file."""

MEAN_OF_MEANS = """
import purestep as ps

def update(model, optimizer, microbatches, problem):
    optimizer.zero_grad()
    for batch in microbatches:
        counts = problem.weights(batch)
        mean = (problem.losses(model, batch) * counts).sum() / counts.sum()
        (mean / len(microbatches)).backward()
    optimizer.step()

trainer = ps.testing.loop(update)
"""
"""Ten lines, wrong where microbatches have other numbers of tokens."""
