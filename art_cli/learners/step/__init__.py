"""One policy step: scored groups become samples, then gradients, and the step reports its metrics."""
