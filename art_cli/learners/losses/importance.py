"""Truncated importance sampling: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training" (fengyao.notion.site/off-policy-rl); Ionides 2008, equation 2.
"""

from torch import Tensor


def truncated_weights(learner: Tensor, engine: Tensor, *, cap: float) -> Tensor:
    """[N] min(pi_learner / pi_engine, cap) of each token, both at the weights that sampled it; detached.

    Where the engine's logprob is NaN (it sampled from a cut distribution) there is nothing to correct with: 1.
    """
    return (learner - engine).exp().clamp(max=cap).nan_to_num(nan=1.0).detach()
