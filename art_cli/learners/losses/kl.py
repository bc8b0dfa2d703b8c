"""The distance to the reference policy: Schulman 2020, "Approximating KL Divergence", estimator k3."""

from torch import Tensor


def k3(new: Tensor, reference: Tensor) -> Tensor:
    """[N] exp(d) - d - 1 with d = reference - new: never negative, zero where they agree; nats per token.

    Its mean over tokens sampled from the policy is KL(policy || reference); GRPO, arXiv:2402.03300, equation 4.
    """
    difference = reference - new
    return difference.exp() - difference - 1
