"""How loss and gradients of a group of microbatches are computed and summed."""
