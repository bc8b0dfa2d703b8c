"""What a judge has spent, whichever judge it is."""

from art_cli.judges import Judge
from art_cli.judges.blend import BlendJudge
from art_cli.judges.cache import Usage
from art_cli.judges.ruler import RulerJudge


def usage_of(judge: Judge) -> tuple[Usage, int]:
    """What this process paid, and the votes that it had from the cache."""
    rulers = _rulers(judge)
    return sum((ruler.usage for ruler in rulers), Usage()), sum(ruler.num_cached for ruler in rulers)


def _rulers(judge: Judge) -> list[RulerJudge]:
    if isinstance(judge, BlendJudge):
        return [ruler for part in judge.judges.values() for ruler in _rulers(part)]
    return [judge] if isinstance(judge, RulerJudge) else []
