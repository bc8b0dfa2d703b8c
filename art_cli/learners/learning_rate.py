"""The learning rate for `train.learning_rate: auto`, from the model's width and whether an adapter is trained.

    whole weights    RATE * WIDTH / width
    an adapter       ADAPTER_RATE * (WIDTH / max(width, WIDTH)) ^ EXPONENT * ALPHA / alpha, at most MAX_RATE

With AdamW every weight moves by about the learning rate per update, so a layer's output changes in proportion to the
number of inputs. The right rate for whole weights therefore falls as 1 / width (muP, Yang et al. 2022,
arXiv:2203.03466). An adapter changes a weight by alpha / rank * B A, where B's part grows with alpha but not with the
rank. Adapter rates are about ten times higher and fall more slowly with width ("LoRA without regret", Schulman et al.
2025; the exponent comes from the authors' fits on Llama models).

ADAPTER_RATE lies within 1e-4 to 1e-3, where SmolLM2-135M learns to choose between two numbers; at 1e-5 it learns
nothing. At width 128 an adapter learns best at 2e-4 to 5e-4. The fit would give 1e-3, which loses 0.1 of tic-tac-toe's
reward, so narrower models use the rate for WIDTH. RATE becomes 1.8e-4 at width 128, and whole weights learn best at
1e-4 to 2e-4. At width 576, 4e-5 ends 0.1 (of a 0.9 rise) below 2e-4 after six steps; the lower rate is kept for longer
runs and wider models. All measurements used steps of 64 attempts and four epochs. Wider models were not measured.
benchmarks/learning/rates.py compares the rule with seven rates.
"""

from art_cli.config.schema import LoraConfig

WIDTH, ALPHA = 576, 32  # width of SmolLM2-135M, default adapter alpha
RATE = 4e-5
ADAPTER_RATE = 4e-4
EXPONENT = 0.78
MAX_RATE = 1e-3


def choose_rate(width: int, lora: LoraConfig | None) -> tuple[float, str]:
    """Returns the learning rate for a model of this width, and a short reason.

    Example: choose_rate(576, LoraConfig()) -> (0.0004, "an adapter on a model of width 576")
    """
    if lora is None:
        return _rounded(RATE * WIDTH / width), f"all weights of a model of width {width}"
    rate = ADAPTER_RATE * (WIDTH / max(width, WIDTH)) ** EXPONENT * ALPHA / lora.alpha
    return _rounded(min(MAX_RATE, rate)), f"an adapter on a model of width {width}"


def _rounded(rate: float) -> float:
    return float(f"{rate:.2g}")
