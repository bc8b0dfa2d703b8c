"""The learning rate that `train.learning_rate: auto` comes to, by the model's width and what of it is trained.

    whole weights    RATE * WIDTH / width
    an adapter       ADAPTER_RATE * (WIDTH / max(width, WIDTH)) ^ EXPONENT * ALPHA / alpha, at most MAX_RATE

With AdamW every weight moves by about the learning rate in each update, so that the change of a layer's output grows
with its number of inputs: the right rate for whole weights falls as 1 / width (muP, Yang et al. 2022,
arXiv:2203.03466). An adapter's change of a weight is alpha / rank * B A, of which B's part grows with alpha and not
with the rank; its rate is about ten times that of whole weights and falls more slowly with the width ("LoRA without
regret", Schulman et al. 2025; the exponent is that of its authors' fits on Llama models).

ADAPTER_RATE lies within 1e-4 to 1e-3, where SmolLM2-135M learns to choose between two numbers; at 1e-5 it learns
nothing. At width 128 an adapter learns best at 2e-4 to 5e-4, and at 1e-3, which the fit would give, it is behind by 0.1
of tic-tac-toe's reward: narrower models get what WIDTH gets. RATE comes to 1.8e-4 there; all weights learn best at
1e-4 to 2e-4. At 576, 4e-5 ends 0.1 of a rise of 0.9 below 2e-4 after six steps; it stands, because longer runs and
wider models take less. All with steps of 64 attempts and four epochs. No wider model was measured.
benchmarks/learning/rates.py sets the rule beside seven rates.
"""

from art_cli.config.schema import LoraConfig

WIDTH, ALPHA = 576, 32  # the width of SmolLM2-135M, the alpha of the default adapter
RATE = 4e-5
ADAPTER_RATE = 4e-4
EXPONENT = 0.78
MAX_RATE = 1e-3


def choose_rate(width: int, lora: LoraConfig | None) -> tuple[float, str]:
    """Returns the learning rate for a model of that width, and the reason in a few words.

    Example: choose_rate(576, LoraConfig()) -> (0.0004, "an adapter on a model of width 576")
    """
    if lora is None:
        return _rounded(RATE * WIDTH / width), f"all weights of a model of width {width}"
    rate = ADAPTER_RATE * (WIDTH / max(width, WIDTH)) ** EXPONENT * ALPHA / lora.alpha
    return _rounded(min(MAX_RATE, rate)), f"an adapter on a model of width {width}"


def _rounded(rate: float) -> float:
    return float(f"{rate:.2g}")
